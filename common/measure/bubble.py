"""Pipeline bubbles: the time that a schedule must waste in theory, and the time that a run wasted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gptscale.common.process.progress import progress

# A backward that is not split is B. Its halves are I, the gradient of the input, and W, that of the weights.
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
# Backward computes two matrix products for each one in forward.
COST = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}


class StageSpan(NamedTuple):
    """One computation of a stage for a micro-batch, in seconds or, in a simulation, in units of a forward."""

    kind: str
    stage: int
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Bubble:
    """How busy one process was in the pipeline.

    theory: the bubble fraction of the schedule if all stages took equally long.
    busy_s, span_s: for each step so far, the seconds of computation and the seconds of the whole step.
    spans: the computations of the last step. Their times count from its beginning.
    began_at: when that step began, by a clock that all processes of the machine share.
    """

    theory: float
    busy_s: tuple[float, ...]
    span_s: tuple[float, ...]
    spans: tuple[StageSpan, ...] = ()
    began_at: float = 0.0


# kind, stage, micro-batch
Computation = tuple[str, int, int]


def simulate(order: Mapping[int, Sequence[Computation]], n_stages: int) -> dict[int, list[StageSpan]]:
    """Run a schedule as fast as its dependencies allow, with transfers that take no time.

    order: what each rank computes, in order. A forward needs the stage before it. A backward needs the stage after it and its own
    forward. The weight half of a backward needs the input half. Raises ValueError for a schedule that never ends.
    """
    queues = {rank: list(computations) for rank, computations in order.items()}
    done: dict[Computation, float] = {}
    spans: dict[int, list[StageSpan]] = {rank: [] for rank in queues}
    while any(queues.values()):
        progress = False
        for rank, queue in queues.items():
            while queue and all(need in done for need in needs(*queue[0], n_stages)):
                kind, stage, micro_batch = queue.pop(0)
                free = spans[rank][-1].end if spans[rank] else 0.0
                begin = max([free, *(done[need] for need in needs(kind, stage, micro_batch, n_stages))])
                end = begin + COST[kind]
                spans[rank].append(StageSpan(kind, stage, micro_batch, begin, end))
                done[result(kind), stage, micro_batch] = end
                progress = True
        if not progress:
            blocked = {rank: queue[0] for rank, queue in queues.items() if queue}
            raise ValueError(f"the schedule never ends: {blocked}")
    return spans


def bubble_fraction(spans: Mapping[int, Sequence[StageSpan]]) -> float:
    """Return the share of all ranks' time in which they compute nothing, from the first computation to the last."""
    all_spans = [span for of_rank in spans.values() for span in of_rank]
    duration = max(s.end for s in all_spans) - min(s.begin for s in all_spans)
    return 1 - sum(s.end - s.begin for s in all_spans) / (duration * len(spans))


def order_of(schedule: Any, n_stages: int, n_microbatches: int) -> dict[int, list[Computation]]:
    """Return what each rank computes, in order, under one of torch's schedule objects."""
    name = type(schedule).__name__
    if name not in ("ScheduleGPipe", "Schedule1F1B"):
        return {
            rank: [c for a in actions for c in _computations(a)] for rank, actions in schedule.pipeline_order.items()
        }
    # torch 2.11 states the order of 1F1B for pictures only, and there its last rank begins with micro-batch 1.
    order = {}
    for stage in range(n_stages):
        ahead = n_microbatches if name == "ScheduleGPipe" else min(n_microbatches, n_stages - stage)
        computations = [(FORWARD, stage, m) for m in range(ahead)]
        for m in range(n_microbatches):
            computations.append((BACKWARD, stage, m))
            if ahead + m < n_microbatches:
                computations.append((FORWARD, stage, ahead + m))
        order[stage] = computations
    return order


def _computations(action: Any) -> Iterator[Computation]:
    """Yield the computations of one of torch's actions: none, one, or the two of an overlapped pair."""
    if action is None:
        return
    if action.sub_actions is not None:
        for sub_action in action.sub_actions:
            yield from _computations(sub_action)
    elif (kind := action.computation_type.value) in COST:
        yield kind, action.stage_index, action.microbatch_index


def result(kind: str) -> str:
    """Return the result that others wait for, which for both kinds of backward is the gradient of the stage's input."""
    return INPUT if kind == BACKWARD else kind


def needs(kind: str, stage: int, micro_batch: int, n_stages: int) -> list[Computation]:
    """Return the results that a computation waits for."""
    if kind == FORWARD:
        return [(FORWARD, stage - 1, micro_batch)] if stage else []
    if kind == WEIGHT:
        return [(INPUT, stage, micro_batch)]
    next_stage = [(INPUT, stage + 1, micro_batch)] if stage + 1 < n_stages else []
    return [(FORWARD, stage, micro_batch), *next_stage]


class StageClock:
    """A clock for the computations of this process's stages: the host's for a CPU, events in the stream for a GPU."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.clock = device, clock
        self.busy_s: list[float] = []
        self.span_s: list[float] = []
        self.spans: tuple[StageSpan, ...] = ()
        self.began_at = 0.0
        self._open: list[tuple[str, int, int, Any, Any]] = []
        self._began: Any = None

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one training step.

        The times of the step before are read from the device first, when that step has long been done.
        """
        self.read()
        self._began, began_at = self._now(), self.clock()
        yield
        self._open.append(("", -1, -1, self._began, self._now()))
        self.began_at = began_at

    @contextmanager
    def computing(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        progress.at("forward" if kind == FORWARD else "backward", micro_batch)
        begin = self._now()
        yield
        self._open.append((kind, stage, micro_batch, begin, self._now()))

    def bubble(self, theory: float) -> Bubble:
        """Return how busy the process was, in steps whose schedule has the bubble fraction `theory`."""
        self.read()
        return Bubble(theory, tuple(self.busy_s), tuple(self.span_s), self.spans, self.began_at)

    def read(self) -> None:
        """Turn the time marks of the last step into seconds."""
        if not self._open:
            return
        if self.device.type == "cuda":
            self._open[-1][4].synchronize()

        def seconds(mark: Any) -> float:
            if self.device.type == "cuda":
                return float(self._began.elapsed_time(mark)) / 1e3
            return float(mark - self._began)

        # The last entry is the step itself.
        *computed, step = [StageSpan(k, s, m, seconds(begin), seconds(end)) for k, s, m, begin, end in self._open]
        self.busy_s.append(sum(s.end - s.begin for s in computed))
        self.span_s.append(step.end - step.begin)
        self.spans, self._open = tuple(computed), []
