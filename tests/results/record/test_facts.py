"""Facts of a row that are asked of the machine, not measured."""

import subprocess

from gptscale.common.measure.live_state import LiveState
from gptscale.results.record import facts


def test_the_highest_of_the_ranks_and_nothing_where_no_rank_counts():
    # Zero is a figure.
    ranks = [{"a": None, "b": 2.0, "c": 0.0}, {"a": None, "b": None, "c": 0.0}]
    assert facts.highest(ranks) == {"a": None, "b": 2.0, "c": 0.0}


def test_the_state_of_the_rank_that_holds_most_beside_its_formula():
    gib = 2**30
    states = [LiveState(3 * gib, gib, gib), None, LiveState(2 * gib, gib, gib, host=2 * gib, disk=gib)]
    assert facts.state_columns(states, ("16 N", 8.0 * gib)) == {
        "state_weights_gib": 2.0,
        "state_gradients_gib": 1.0,
        "state_optimizer_gib": 1.0,
        "state_host_gib": 2.0,
        "state_disk_gib": 1.0,
        "state_formula": "16 N",
        "state_formula_gib": 8.0,
    }
    assert facts.state_columns([None, None], None) == {}


def test_a_commit_is_short_and_a_checkout_without_git_has_none(tmp_path, monkeypatch):
    module = tmp_path / "results" / "record" / "facts.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(facts, "__file__", str(module))
    assert facts.git_commit() == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"], ["tag", "v1"]):
        subprocess.run([*git, *words], check=True, timeout=30)
    commit = facts.git_commit()
    assert len(commit) == 12
    assert set(commit) <= set("0123456789abcdef")
    module.write_text("changed")
    subprocess.run([*git, "add", "."], check=True, timeout=30)
    assert facts.git_commit() == f"{commit}+"
    # There is no program git.
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.git_commit() == ""
