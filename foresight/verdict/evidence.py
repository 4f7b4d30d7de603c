"""Collect what a verdict needs, on every rank, after the last step of a run.

The steps that it takes count in no figure, and leave no state.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gptscale.common.measure.step_trace import STEPS, RankTrace, own_s, trace_steps
from gptscale.common.process.world import agree_any
from gptscale.foresight.verdict.remedies import RunFacts
from gptscale.foresight.verdict.verdict import Verdict, judge
from gptscale.results.record.files import warn

RANKS_MAX = 64


@dataclass(frozen=True)
class RankEvidence:
    """The evidence of one rank.

    data_wait_s: its mean wait for a batch in the timed steps. right_threads_s: the mean step with as many threads as it has
    processors, None if it has so many.
    """

    trace: RankTrace
    data_wait_s: float
    right_threads_s: float | None


def evidence_of(
    rank: int, step: Callable[[int], object], device: torch.device, data_waits_s: Sequence[float], *, keep: bool = False
) -> RankEvidence | None:
    """Call `step` with 0, 1, ... and return what they show. All ranks call this together, after their last step.

    step: takes one more step and waits for its result. keep: the operations of the profiled step, too. What fails here fails no
    run, whose work is done.
    """
    try:
        trace = trace_steps(rank, step, device, keep=keep)
        threads_s = _with_right_threads(step) if device.type == "cpu" else None
        return RankEvidence(trace, statistics.fmean(data_waits_s) if data_waits_s else 0.0, threads_s)
    except Exception as error:
        warn(f"rank {rank}: this run has no verdict ({error})")
        return None


def right_threads() -> int:
    """Return how many threads each rank of this machine should have: its share of the processors."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _with_right_threads(step: Callable[[int], object]) -> float | None:
    """Return the mean step with the right number of threads, None if all ranks have it already."""
    threads = torch.get_num_threads()
    if not agree_any(threads != right_threads()):
        return None
    torch.set_num_threads(right_threads())
    step(STEPS + 1)
    began = time.perf_counter()
    for i in range(STEPS):
        step(STEPS + 2 + i)
    torch.set_num_threads(threads)
    return (time.perf_counter() - began) / STEPS


def verdict_of(
    evidence: Sequence[RankEvidence | None],
    facts: RunFacts,
    step_times_s: Sequence[float],
    taken: float | None,
    late: tuple[int, float] | None = None,
) -> Verdict | None:
    """Return the verdict on the evidence of all ranks, None if one of them has none, or no step was timed.

    Of a large world RANKS_MAX ranks are judged, and the one with the most work of its own is among them. late: that rank and how
    much more it has than the median of the others, by the timed steps, if they can tell.
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
        return judge(
            [e.trace for e in ranks],
            facts,
            step_times_s=step_times_s,
            data_wait_s=[e.data_wait_s for e in ranks],
            taken=taken,
            right_threads_s=max(threads_s, default=None),
            slowest=late,
        )
    except Exception as error:
        # A fault of the verdict is none of the run.
        warn(f"this run has no verdict ({type(error).__name__}: {error})")
        return None
