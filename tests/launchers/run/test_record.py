"""Columns of a run's row from what its ranks measured. Runs in tests/launchers/run/test_worker.py leave whole rows."""

import re
from types import SimpleNamespace

import pytest

from gptscale.common.measure.bubble import Bubble
from gptscale.common.measure.offload import Offload
from gptscale.launchers.run.record import bubble_figures, new_run_id, offload_figures

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


def test_without_files_there_are_no_rates():
    figures = offload_figures([Offload(cpu_bytes=GIB, waits_s=(0.0, 0.0))], RECORDER)
    assert (figures["offload_read_gib_per_s"], figures["offload_write_gib_per_s"]) == (None, None)
    assert figures["offload_wait_fraction"] == 0.0


def test_the_bubble_is_the_share_of_timed_steps_that_ranks_idled():
    ranks = [
        Bubble(0.25, busy_s=(9.0, 1.5, 1.5), span_s=(9.0, 2.0, 2.0)),
        Bubble(0.25, busy_s=(9.0, 1.0, 1.0), span_s=(9.0, 2.0, 2.0)),
    ]
    # 5 of 8 s were busy.
    assert bubble_figures(ranks, RECORDER) == {"bubble_fraction": pytest.approx(3 / 8), "bubble_fraction_theory": 0.25}


def test_a_run_of_warm_up_steps_alone_has_theory_and_bytes_only():
    recorder = SimpleNamespace(step_times_s=[])
    assert bubble_figures([Bubble(0.5, (1.0,), (2.0,))], recorder)["bubble_fraction"] is None
    assert offload_figures([Offload(cpu_bytes=GIB, waits_s=(1.0,))], recorder)["offload_wait_fraction"] is None


@pytest.mark.parametrize("figures", [offload_figures, bubble_figures])
def test_other_runs_have_no_such_columns(figures):
    assert figures([None, None], RECORDER) == {}
    assert figures([Offload(), Bubble(0.0, (), ())], None) == {}


def test_a_run_without_a_name_gets_one_that_no_twin_has():
    names = {new_run_id("fsdp") for _ in range(20)}
    assert all(re.fullmatch(r"fsdp-\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)
    assert len(names) > 15
