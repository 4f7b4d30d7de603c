"""Collect what a verdict needs, on every rank, after the last step of a run.

The steps that it takes count in no figure, and leave no state.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gptscale.common.measure.step_trace import STEPS, RankTrace, own_s, trace_steps
from gptscale.common.process.progress import StepMark, progress
from gptscale.common.process.world import agree_any
from gptscale.foresight.verdict.calibrated import CalibratedRun
from gptscale.foresight.verdict.judge import HOST_MIN, RunFigures, judge
from gptscale.foresight.verdict.remedies import RunFacts
from gptscale.foresight.verdict.replay import TRANSFER
from gptscale.foresight.verdict.shares import host_share
from gptscale.foresight.verdict.verdict import Verdict
from gptscale.results.record.files import warn

RANKS_MAX = 64
# A few short steps have so many times fewer tokens. They show what of the work does not shrink with the tokens.
SHORT = 4


@dataclass(frozen=True)
class RankEvidence:
    """The evidence of one rank.

    data_wait_s: its mean wait for a batch in the timed steps. right_threads_s: the median step with as many threads as it has
    processors, None if it has so many. fixed: the share of each computing part, and of transfers, that a step with fewer tokens
    takes as well, empty if that was not measured. alloc_retries: how often the device's allocator freed its cache to try again.
    """

    trace: RankTrace
    data_wait_s: float
    right_threads_s: float | None
    fixed: Mapping[str, float] = field(default_factory=dict)
    alloc_retries: int = 0


def evidence_of(
    rank: int,
    step: Callable[[int], object],
    device: torch.device,
    data_waits_s: Sequence[float],
    *,
    short_step: Callable[[int], object] | None = None,
    keep: bool = False,
) -> RankEvidence | None:
    """Call `step` with 0, 1, ... and return what they show. All ranks call this together, after their last step.

    step: takes one more step and waits for its result. short_step: takes one with a SHORT-th of each sequence, None where that
    cannot be. keep: the operations of the profiled step, too. What fails here fails no run, whose work is done.
    """
    try:
        retries = torch.cuda.memory_stats(device)["num_alloc_retries"] if device.type == "cuda" else 0
        trace, n = trace_steps(rank, step, device, keep=keep), STEPS + 1
        fixed: dict[str, float] = {}
        wrong_threads = device.type == "cpu" and agree_any(torch.get_num_threads() != right_threads())
        threads_s = _with_right_threads(step, n) if wrong_threads else None
        # Threads that wait for each other take time that does not shrink with the tokens either.
        if short_step and not wrong_threads and agree_any(host_share(trace, threads=True) >= HOST_MIN):
            fixed = _fixed_shares(step, short_step, n)
        data_wait_s = statistics.fmean(data_waits_s) if data_waits_s else 0.0
        return RankEvidence(trace, data_wait_s, threads_s, fixed, retries)
    except Exception as error:
        warn(f"rank {rank}: this run has no verdict ({error})")
        return None


def _fixed_shares(step: Callable[[int], object], short_step: Callable[[int], object], first: int) -> dict[str, float]:
    """Return the share of each computing part and of transfers that does not shrink with the tokens of a step.

    Whole and short steps take turns, so that a machine whose speed changes changes both.
    """
    short_step(first)
    whole_marks: list[StepMark] = []
    short_marks: list[StepMark] = []
    for i in range(first + 1, first + 1 + 2 * STEPS, 2):
        for turn, (call, marks) in enumerate(((step, whole_marks), (short_step, short_marks))):
            with progress.marking() as marked:
                call(i + turn)
            marks += marked
    whole, short = _seconds(whole_marks), _seconds(short_marks)
    return {
        part: min(1.0, max(0.0, (SHORT * short[part] / whole[part] - 1) / (SHORT - 1))) for part in short if whole[part]
    }


def _seconds(marks: Sequence[StepMark]) -> dict[str, float]:
    """Return the seconds with a processor in forward and backward, and those of waits."""
    seconds = {
        part: sum(m.processor_s for m in marks if m.part == part and not m.waits) for part in ("forward", "backward")
    }
    return seconds | {TRANSFER: sum(m.end - m.begin for m in marks if m.waits)}


def right_threads() -> int:
    """Return how many threads each rank of this machine should have: its share of the processors."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _with_right_threads(step: Callable[[int], object], first: int) -> float:
    """Return the median step with the right number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(right_threads())
    step(first)
    times_s = []
    for i in range(STEPS):
        began = time.perf_counter()
        step(first + 1 + i)
        times_s.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return statistics.median(times_s)


def verdict_of(
    evidence: Sequence[RankEvidence | None],
    facts: RunFacts,
    step_times_s: Sequence[float],
    taken: float | None,
    late: tuple[int, float] | None = None,
    calibration: Callable[[Sequence[RankTrace]], CalibratedRun | None] | None = None,
) -> Verdict | None:
    """Return the verdict on the evidence of all ranks, None if one of them has none, or no step was timed.

    Of a large world RANKS_MAX ranks are judged, and the one with the most work of its own is among them. late: that rank and how
    much more it has than the median of the others, by the timed steps, if they can tell. calibration: what the calibration of the
    machine expects of traces.
    """
    ranks = [e for e in evidence if e is not None]
    if len(ranks) < len(evidence) or not ranks or not step_times_s:
        return None
    if len(ranks) > RANKS_MAX:
        slowest = ranks[late[0]] if late else max(ranks, key=lambda e: own_s(e.trace))
        others = [e for e in ranks if e is not slowest]
        ranks = [slowest, *others[:: -(-len(others) // (RANKS_MAX - 1))]]
        ranks.sort(key=lambda e: e.trace.rank)
    threads_s = [e.right_threads_s for e in ranks if e.right_threads_s is not None]
    try:
        traces = [e.trace for e in ranks]
        figures = RunFigures(
            step_times_s,
            [e.data_wait_s for e in ranks],
            taken,
            late,
            max(threads_s, default=None),
            {part: statistics.fmean(e.fixed[part] for e in ranks) for part in ranks[0].fixed},
            calibration(traces) if calibration else None,
        )
        return judge(traces, facts, figures)
    except Exception as error:
        # A fault of the verdict is none of the run.
        warn(f"this run has no verdict ({type(error).__name__}: {error})")
        return None
