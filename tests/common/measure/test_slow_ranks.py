"""Own work of ranks: counted on a made-up clock, compared between ranks, and found in real worlds with a slow rank."""

import pytest
from made_up_clock import Clock
from worlds import ranks, rows

from gptscale.common.measure import slow_ranks
from gptscale.common.measure.slow_ranks import SlowRanks, slowest
from gptscale.common.process.progress import OWN_PARTS, Progress


def test_waits_for_other_ranks_are_no_own_work():
    clock = Clock()
    progress = Progress(clock)
    progress.at("forward")
    clock.passes(2.0)
    with progress.waiting():
        clock.passes(5.0)
    clock.passes(1.0)
    progress.at("backward")
    clock.passes(4.0)
    progress.wait_begins()
    clock.passes(7.0)
    with progress.waiting():
        clock.passes(7.0)
    progress.at("saving")
    clock.passes(100.0)
    progress.at("data")
    own = dict(zip(OWN_PARTS, progress.lap(), strict=True))
    assert {part: s for part, s in own.items() if s} == {"forward": 3.0, "backward": 4.0}
    assert not any(progress.lap())


def test_a_pause_of_the_whole_process_in_a_wait_is_its_own():
    clock = Clock()
    progress = Progress(clock)
    progress.at("forward")
    progress.wait_begins()
    clock.passes(9.0)
    progress.stood_still(2.0)
    progress.at("forward")
    clock.passes(3.0)
    # This pause is counted in forward already.
    progress.stood_still(2.0)
    assert dict(zip(OWN_PARTS, progress.lap(), strict=True))["stopped"] == 2.0


def test_the_slowest_is_compared_with_the_median_of_the_others():
    assert slowest([1.0, 3.0]) == (1, 3.0)
    assert slowest([2.0, 1.0, 9.0, 3.0]) == (2, 4.5)


def test_a_slow_rank_is_named_once_and_again_after_it_was_well(monkeypatch):
    """Rank 1 is slow in the windows 2, 3 and 5. The window of warm-up is not judged, whoever is slow there."""
    parts = {"well": [0.1, 1.0, 1.0, 0.1, 0.0, 0.1, 0.0], "slow": [0.1, 1.0, 9.0, 0.1, 0.0, 0.1, 0.0]}
    windows = iter(["slow", "well", "slow", "slow", "well", "slow"])
    monkeypatch.setattr(slow_ranks, "gather_numbers", lambda own: [parts["well"], parts[next(windows)]])
    own = SlowRanks(0, 3, Progress())
    lines = {step: line for step in range(1, 84) if (line := own.step(step, last=step == 83))}
    assert list(lines) == [35, 83]
    assert lines[35] == (
        "rank 1 is slow: 643.7 ms of its own work a step, 4.5 times the others', above all in backward, in steps 20 to 35"
    )
    assert (own.rank, own.ratio) == (1, pytest.approx((3 * 10.3 + 2 * 2.3) / (5 * 2.3)))


@pytest.mark.promise("P17 | a rank that is ten times slower | is named, with a column in the summary; the run goes on")
@pytest.mark.parametrize("recipe", ["ddp", "fsdp", "zero2", "tensor_parallel", "pipeline"])
def test_a_rank_that_sleeps_is_named(recipe, tmp_path, capfd):
    # Two blocks, one for each rank of a pipeline, and short sequences: what the ranks do beside the sleep is little.
    words = ["--steps", 12, "--n-layer", 2, "--seq-len", 32, "--data", "synthetic", "--no-tensorboard"]
    ranks("world_faulty.py", 2, "slow", recipe, *words, "--out", tmp_path)
    err = capfd.readouterr().err
    assert "gptscale: warning: rank 1 is slow: " in err
    assert "above all in forward, in steps 4 to 12" in err
    (row,) = rows(tmp_path / "summary.csv")
    assert row["slowest_rank"] == "1"
    assert float(row["slowest_rank_ratio"]) > 1.5
