"""Columns of a run's row from what its ranks measured. Runs in tests/launchers/run/test_worker.py leave whole rows."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gptscale.common.measure.bubble import Bubble
from gptscale.common.measure.live_state import LiveState, Offload
from gptscale.common.measure.speed import peak_memory, speed
from gptscale.common.settings import plan_file
from gptscale.foresight.verdict.judge import Verdict
from gptscale.launchers.run.record import OF_LOSS, RunRecord, bubble_figures, new_run_id, offload_figures
from gptscale.results.columns import SUMMARY
from gptscale.results.record.facts import highest, state_columns

GIB = 2**30
# Two timed steps of 2 s behind a warm-up that is not timed.
RECORDER = SimpleNamespace(step_times_s=[2.0, 2.0])


def test_offload_counts_the_fullest_slowest_and_longest_waiting_rank():
    ranks = [
        Offload(cpu_bytes=GIB, disk_bytes=4 * GIB, read_bytes_per_s=2 * GIB, write_bytes_per_s=GIB, waits_s=(9, 1, 1)),
        Offload(cpu_bytes=3 * GIB, read_bytes_per_s=GIB, write_bytes_per_s=3 * GIB, waits_s=(9, 0, 1)),
        None,
    ]
    assert offload_figures(ranks, RECORDER) == {
        "offload_cpu_gib": 3.0,
        "offload_disk_gib": 4.0,
        "offload_read_gib_per_s": 1.0,
        "offload_write_gib_per_s": 1.0,
        # The first wait belongs to the warm-up: 2 of 4 s.
        "offload_wait_fraction": 0.5,
    }


def test_the_bubble_is_the_share_of_timed_steps_that_ranks_idled():
    ranks = [
        Bubble(0.25, busy_s=(9.0, 1.5, 1.5), span_s=(9.0, 2.0, 2.0)),
        Bubble(0.25, busy_s=(9.0, 1.0, 1.0), span_s=(9.0, 2.0, 2.0)),
    ]
    # 5 of 8 s were busy.
    assert bubble_figures(ranks, RECORDER) == {"bubble_fraction": pytest.approx(3 / 8), "bubble_fraction_theory": 0.25}


def test_without_files_no_rates_and_without_timed_steps_no_shares():
    figures = offload_figures([Offload(cpu_bytes=GIB, waits_s=(0.0, 0.0))], RECORDER)
    assert (figures["offload_read_gib_per_s"], figures["offload_write_gib_per_s"]) == (None, None)
    assert figures["offload_wait_fraction"] == 0.0
    recorder = SimpleNamespace(step_times_s=[])
    assert bubble_figures([Bubble(0.5, (1.0,), (2.0,))], recorder)["bubble_fraction"] is None
    assert offload_figures([Offload(cpu_bytes=GIB, waits_s=(1.0,))], recorder)["offload_wait_fraction"] is None


@pytest.mark.parametrize("part", [offload_figures, bubble_figures])
def test_other_runs_have_no_such_columns(part):
    assert part([None, None], RECORDER) == {}
    assert part([Offload(), Bubble(0.0, (), ())], None) == {}


def test_a_run_without_a_name_gets_one_that_no_twin_has():
    names = {new_run_id("fsdp") for _ in range(20)}
    assert all(re.fullmatch(r"fsdp-\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)
    assert len(names) > 15


def test_each_part_of_a_run_fills_the_columns_of_its_name(plan, monkeypatch):
    """A key that is no column would be found after the last step, when the row is written."""
    row = SimpleNamespace(predicted_step_time_s=1.0, predicted_peak_mem_gib=1.0, plan_hash="")
    monkeypatch.setattr(plan_file, "read_row", lambda path, number: row)
    slow, spikes = SimpleNamespace(rank=1, ratio=2.0), SimpleNamespace(skipped=lambda: 0)
    measured = {}
    for precision in ("fp32", "fp8"):
        measured |= speed(plan("--precision", precision).run, "cpu", [1.0], [0.0])
    steps = SimpleNamespace(
        **dict.fromkeys(OF_LOSS, 1.0),
        speed=lambda: measured,
        slow_ranks=slow,
        spikes=spikes,
        train_time_s=1.0,
        **vars(RECORDER),
    )
    cause = SimpleNamespace(name="data-bound", share=0.5, without_s=0.5)
    verdict = Verdict("data-bound", 1.0, 0.0, 1.0, {}, [cause])
    record = RunRecord(plan(), "r")
    record.recorder = steps
    made = {
        "start": record.identity(),
        "plan": plan_file.predicted_columns(Path("plan.json"), 1),
        "steps": record.figures(),
        "offload": offload_figures([Offload(cpu_bytes=GIB)], RECORDER),
        "bubble": bubble_figures([Bubble(0.5, (1.0,), (2.0,))], RECORDER),
        "state": state_columns([LiveState()], ("16 N", GIB)),
        "memory": highest([peak_memory(torch.device("cpu"))]),
        "verdict": verdict.columns(),
    }
    for source, row in made.items():
        assert set(row) == {column.name for column in SUMMARY.columns if column.source == source}, source
    assert {column.source for column in SUMMARY.columns} - set(made) == {"row", "usage", "contention"}


def test_optimizer_rate_and_attention_are_columns(plan):
    row = RunRecord(plan("--optimizer", "sgd", "--lr", "0.5", "--attention", "math"), "r").identity()
    assert (row["optimizer"], row["lr"], row["attention"]) == ("sgd", 0.5, "math")
    assert RunRecord(plan(), "r").identity()["lr"] > 0
