"""A spike in real runs: said, skipped alike on all ranks, or the end of the run, and decided alike after a resume."""

import pytest
from worlds import assert_same_state, ranks, rows, steps

WORDS = ["--steps", 44, "--data", "synthetic", "--no-tensorboard", "--n-layer", 1, "--seq-len", 32, "--run-name", "r"]
WORDS += ["--no-verdict"]


def test_by_default_it_is_said_with_its_batch(tmp_path, capfd):
    ranks("world_faulty.py", 2, "spike", "ddp", *WORDS, "--out", tmp_path, "--log-every", 11)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "standard deviations" in line]
    assert line.startswith("gptscale: warning: loss ")
    assert line.endswith("the step was applied (--on-spike warn)")
    (row,) = rows(tmp_path / "runs" / "r" / "spikes.csv")
    assert (row["step"], row["figure"], row["skipped"]) == ("40", "loss", "false")
    assert len(row["sequences"].split()) == 8
    assert f", at step 40 (sequences {row['sequences']}), " in line
    assert rows(tmp_path / "summary.csv")[0]["skipped_spikes"] == ""


@pytest.mark.promise(
    "N5 | a spike of the loss or the norm | is said with its batch, left out on all ranks, or ends the run with 6 "
    "(`--on-spike`)"
)
@pytest.mark.parametrize("recipe", ["fsdp", "pipeline", "fairscale_sdp"])
def test_a_skipped_step_changes_no_weight_and_is_counted(recipe, tmp_path, capfd):
    """What is saved behind it is what was saved before. A resumed run decides as the whole one: it knows the steps before."""
    options = [*WORDS, "--on-spike", "skip", "--save-every", 39, "--keep-checkpoints", 3, "--out", tmp_path]
    ranks("world_faulty.py", 2, "spike", recipe, *options)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "standard deviations" in line]
    assert line.endswith("the step was skipped")
    folder = tmp_path / "runs" / "r"
    assert rows(tmp_path / "summary.csv")[0]["skipped_spikes"] == "1"
    whole = steps(folder)
    assert whole.loss[40] > 3 * whole.loss[39]
    before, behind = (folder / "checkpoints" / f"step-{step}" for step in (39, 40))
    ranks("world_faulty.py", 2, "spike", recipe, *options, "--resume", before, "--save-every", 40)
    assert_same_state(behind, before)
    again = steps(folder)
    assert again[["loss", "grad_norm"]].equals(whole[["loss", "grad_norm"]])
    assert [row["skipped_spikes"] for row in rows(tmp_path / "summary.csv")] == ["1", "1"]


@pytest.mark.promise("N5")
def test_stop_ends_the_run_and_saves_nothing_more(tmp_path, capfd):
    words = [*WORDS, "--out", tmp_path, "--on-spike", "stop", "--save-every", 20]
    ranks("world_faulty.py", 2, "spike", "ddp", *words, status=6)
    assert "standard deviations above the mean" in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "runs" / "r" / "checkpoints").iterdir()) == ["step-20"]
