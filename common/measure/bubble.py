"""Pipeline bubbles: what a schedule must waste in theory, and what a run wasted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"  # a whole backward is B; its halves are I and W
COST = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}  # two matrix products in backward for one in forward


class Span(NamedTuple):
    """One computation of a stage for a micro-batch, in seconds (or, in theory, in units of a forward)."""

    kind: str
    stage: int
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Bubble:
    """Of one process. theory: the schedule's bubble fraction with equal stages. busy_s, span_s: of each step so far.

    spans: of the last step, from its beginning, which was at `began_at` by the clock of the whole machine.
    """

    theory: float
    busy_s: tuple[float, ...]
    span_s: tuple[float, ...]
    spans: tuple[Span, ...] = ()
    began_at: float = 0.0


Computation = tuple[str, int, int]  # kind, stage, micro-batch


def simulate(order: Mapping[int, Sequence[Computation]], n_stages: int) -> dict[int, list[Span]]:
    """Run a schedule (what each rank computes, in order) as fast as its dependencies allow, transfers taking no time.

    A forward needs the stage before, a backward the stage behind and its own forward, a weight half its input half.
    """
    queues = {rank: list(computations) for rank, computations in order.items()}
    done: dict[Computation, float] = {}
    spans: dict[int, list[Span]] = {rank: [] for rank in queues}
    while any(queues.values()):
        moved = False
        for rank, queue in queues.items():
            while queue and all(need in done for need in _needs(*queue[0], n_stages)):
                kind, stage, micro_batch = queue.pop(0)
                free = spans[rank][-1].end if spans[rank] else 0.0
                begin = max([free, *(done[need] for need in _needs(kind, stage, micro_batch, n_stages))])
                end = begin + COST[kind]
                spans[rank].append(Span(kind, stage, micro_batch, begin, end))
                done[_gives(kind), stage, micro_batch] = end
                moved = True
        if not moved:
            raise ValueError(
                f"the schedule never ends: { ({rank: queue[0] for rank, queue in queues.items() if queue}) }"
            )
    return spans


def bubble_fraction(spans: Mapping[int, Sequence[Span]]) -> float:
    """Share of all ranks' time, from the first computation to the last, in which they compute nothing."""
    everything = [span for of_rank in spans.values() for span in of_rank]
    whole = max(s.end for s in everything) - min(s.begin for s in everything)
    return 1 - sum(s.end - s.begin for s in everything) / (whole * len(spans))


def order_of(schedule: Any, n_stages: int, n_microbatches: int) -> dict[int, list[Computation]]:
    """What each rank computes under one of torch's schedule objects, in order."""
    name = type(schedule).__name__
    if name not in ("ScheduleGPipe", "Schedule1F1B"):
        return {
            rank: [c for a in actions for c in _computations(a)] for rank, actions in schedule.pipeline_order.items()
        }
    order = {}  # torch 2.11 states 1F1B's order for pictures only: its last rank begins with micro-batch 1
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
    """Of one of torch's actions: none, one, or the two of an overlapped pair."""
    if action is None:
        return
    if action.sub_actions is not None:
        for part in action.sub_actions:
            yield from _computations(part)
    elif (kind := action.computation_type.value) in COST:
        yield kind, action.stage_index, action.microbatch_index


def _gives(kind: str) -> str:
    """The result that others may wait for: the gradient of a stage's input comes from either kind of backward."""
    return INPUT if kind == BACKWARD else kind


def gaps(spans: Mapping[int, Sequence[Span]], n_stages: int) -> dict[int, list[tuple[str, float, float]]]:
    """What each rank did between its computations, (what, begin, end), from a trace on one clock.

    Before a computation it waits: `bubble` until another rank has computed what is needed, `communication` from then on
    (the transfer, and the runtime's own work). Behind the last computation, until all ranks are done: `bubble`.
    """
    done = {(_gives(s.kind), s.stage, s.micro_batch): s.end for of_rank in spans.values() for s in of_rank}
    begin = min(s.begin for of_rank in spans.values() for s in of_rank)
    end = max(done.values())
    found: dict[int, list[tuple[str, float, float]]] = {}
    for rank, of_rank in spans.items():
        free, found[rank] = begin, []
        for span in of_rank:
            ready = max([free, *(done[need] for need in _needs(span.kind, span.stage, span.micro_batch, n_stages))])
            ready = min(ready, span.begin)
            found[rank] += [("bubble", free, ready), ("communication", ready, span.begin)]
            free = span.end
        found[rank].append(("bubble", free, end))
    return {rank: [gap for gap in of_rank if gap[2] > gap[1]] for rank, of_rank in found.items()}


def _needs(kind: str, stage: int, micro_batch: int, n_stages: int) -> list[Computation]:
    if kind == FORWARD:
        return [(FORWARD, stage - 1, micro_batch)] if stage else []
    if kind == WEIGHT:
        return [(INPUT, stage, micro_batch)]
    behind = [(INPUT, stage + 1, micro_batch)] if stage + 1 < n_stages else []
    return [(FORWARD, stage, micro_batch), *behind]


class StageClock:
    """Times the computations of this process's stages: on the host for a CPU, by events in the stream for a GPU."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.clock = device, clock
        self.busy_s: list[float] = []
        self.span_s: list[float] = []
        self.spans: tuple[Span, ...] = ()
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
        """Around a step; what the one before left on the device is read now, when it has long been done."""
        self.read()
        self._began, began_at = self._now(), self.clock()
        yield
        self._open.append(("", -1, -1, self._began, self._now()))
        self.began_at = began_at

    @contextmanager
    def computing(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Around one computation."""
        begin = self._now()
        yield
        self._open.append((kind, stage, micro_batch, begin, self._now()))

    def read(self) -> None:
        """Turn the last step's marks into seconds."""
        if not self._open:
            return
        if self.device.type == "cuda":
            self._open[-1][4].synchronize()

        def seconds(mark: Any) -> float:
            since: float = self._began.elapsed_time(mark) / 1e3 if self.device.type == "cuda" else mark - self._began
            return since

        *computed, whole = [Span(k, s, m, seconds(begin), seconds(end)) for k, s, m, begin, end in self._open]
        self.busy_s.append(sum(s.end - s.begin for s in computed))
        self.span_s.append(whole.end - whole.begin)
        self.spans, self._open = tuple(computed), []
