"""The evidence on a run's speed, which every rank collects after the last step, and which a lab can judge without the run.

The steps that it takes count in no figure, and leave no state.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gptscale.common.measure.contention import MachineTime
from gptscale.common.measure.step_trace import HOST_MIN, STEPS, TRANSFER, RankTrace, host_share, own_s, trace_steps
from gptscale.common.process.begin import right_threads
from gptscale.common.process.progress import StepMark, progress
from gptscale.common.process.world import agree_any

# The files in a run's folder: the evidence, and what its judge makes of it.
EVIDENCE, VERDICT = "evidence.json", "verdict.json"
FORMAT_VERSION = 1
# More ranks would show a judge nothing new.
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


@dataclass(frozen=True)
class RunFacts:
    """What a remedy depends on.

    recipe: its name, empty for a vision run, whose loader may be torch's slow one. threads: of a rank. right_threads: how many it
    should have. best_micro_batches: how many of them fill a pipeline best, which a judge finds, None for one for each sequence.
    """

    recipe: str
    cuda: bool = False
    pipeline: bool = False
    compiled: bool = False
    micro_batch_size: int = 1
    grad_accum_steps: int = 1
    threads: int = 1
    right_threads: int = 1
    slow_loader: bool = False
    best_micro_batches: int | None = None


@dataclass(frozen=True)
class RunEvidence:
    """The evidence of a run.

    summary: the name of the file that has its row. ranks: of at most RANKS_MAX ranks. step_times_s: of the timed steps. taken:
    what others had of the machine. late: the rank with the most work of its own in them, and that divided by the median of the
    others', if they can tell. notes: what the meters saw, a sentence each.
    """

    summary: str
    facts: RunFacts
    ranks: Sequence[RankEvidence]
    step_times_s: Sequence[float]
    taken: float | None = None
    late: tuple[int, float] | None = None
    notes: Sequence[str] = ()

    def as_json(self) -> bytes:
        return json.dumps({"format_version": FORMAT_VERSION, **vars(self)}, default=_plain).encode()


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else vars(value)


def evidence_of(
    rank: int,
    step: Callable[[int], object],
    device: torch.device,
    data_waits_s: Sequence[float],
    *,
    short_step: Callable[[int], object] | None = None,
    keep: bool = False,
) -> RankEvidence:
    """Call `step` with 0, 1, ... and return what they show. All ranks call this together, after their last step.

    step: takes one more step and waits for its result. short_step: takes one with a SHORT-th of each sequence, None where that
    cannot be. keep: the operations of the profiled step, too.
    """
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
    own = [m for m in marks if not m.waits]
    seconds = {part: sum(m.processor_s for m in own if m.part == part) for part in ("forward", "backward")}
    return seconds | {TRANSFER: sum(m.end - m.begin for m in marks if m.waits)}


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


def judged_ranks(ranks: Sequence[RankEvidence], late: tuple[int, float] | None = None) -> list[RankEvidence]:
    """Return at most RANKS_MAX of all ranks, among them the late one, or else the one with the most work of its own."""
    if len(ranks) <= RANKS_MAX:
        return list(ranks)
    slowest = ranks[late[0]] if late else max(ranks, key=lambda e: own_s(e.trace))
    others = [e for e in ranks if e is not slowest]
    chosen = [slowest, *others[:: -(-len(others) // (RANKS_MAX - 1))]]
    return sorted(chosen, key=lambda e: e.trace.rank)


def notes(
    ranks: Sequence[RankEvidence], times: Sequence[MachineTime | None], offload_wait: float | None = None
) -> list[str]:
    """Return what the meters of all ranks say beside the steps, a sentence each.

    offload_wait: the share of time in which a rank waited for state that is kept off its device, None if none is.
    """
    lines = [f"rank {rank}: {time.gpu_time}" for rank, time in enumerate(times) if time and time.gpu_time]
    retries = {e.trace.rank: e.alloc_retries for e in ranks if e.alloc_retries}
    lines += [f"rank {rank}: the allocator freed its cache and tried again {n} times" for rank, n in retries.items()]
    if offload_wait is not None:
        lines.append(f"in the timed steps {offload_wait:.1%} of the time was a wait for state off the device")
    return lines
