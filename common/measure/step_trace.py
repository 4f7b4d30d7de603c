"""Trace a few steps of one process: what it did and when it waited, by marks that cost nothing, and its operations.

The steps by marks are as fast as any other. The step under torch.profiler is not, and only tells what the work was made of.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from gptscale.common.measure.exchanges import ExchangeLog, TracedExchange
from gptscale.common.measure.speed import synchronize
from gptscale.common.process.progress import StepMark, progress
from gptscale.common.process.world import gather_objects

# Steps by marks, before one under the profiler.
STEPS = 3
# Kinds of work. What is none of them in a computing part is the host: Python, dispatch, autograd.
PRODUCTS, ATTENTION, ELEMENTWISE, OPTIMIZER = KINDS = ("products", "attention", "elementwise", "optimizer")
COMPUTING = ("forward", "backward", "optimizer")
# The kind of what is sent. All other kinds are parts of a step, by the names of marks.
TRANSFER = "transfer"
# From this share of the host on, work that does not shrink with the tokens is the host's.
HOST_MIN = 0.05
# A profiled step of which a thread had a smaller share says nothing of the host.
PROCESSOR_MIN = 0.95


class TracedOperation(NamedTuple):
    """An operation of the profiled step, on the host or a device, in seconds by the clock of the segments."""

    name: str
    on_device: bool
    begin: float
    end: float


@dataclass
class RankTrace:
    """The trace of one rank.

    clock: its own clock when all ranks left a barrier, to compare clocks of several machines. ends: when each step by marks
    ended. work_s: of the profiled step, seconds of each kind of work in each computing part; the host's share is what remains
    of the part. n_operations, profiled, operations, profiled_exchanges: of that step, the operations kept for `--profile` only.
    operation_s: what an operation costs that computes nothing. processors: those of its machine that it may use, none if a
    device computes.
    """

    rank: int
    host: str
    clock: float
    began: float
    segments: list[StepMark]
    ends: list[float]
    work_s: dict[str, dict[str, float]] = field(default_factory=dict)
    n_operations: int = 0
    operation_s: float = 0.0
    profiled: list[StepMark] = field(default_factory=list)
    operations: list[TracedOperation] = field(default_factory=list)
    exchanges: list[TracedExchange] = field(default_factory=list)
    profiled_exchanges: list[TracedExchange] = field(default_factory=list)
    processors: frozenset[int] = frozenset()


def own_s(trace: RankTrace) -> float:
    """Return the seconds of a rank's own work in its traced steps: all but waits for others and for data."""
    return sum(s.end - s.begin for s in trace.segments if not s.waits and s.part != "data")


def trace_steps(rank: int, step: Callable[[int], object], device: torch.device, *, keep: bool = False) -> RankTrace:
    """Call `step` with 0, 1, ... and return what it did. All ranks call this together. keep: the operations too."""
    gather_objects(None)
    clock = time.perf_counter()
    with ExchangeLog().watching() as exchanges, progress.marking() as marks:
        began, ends = time.perf_counter(), []
        for i in range(STEPS):
            step(i)
            ends.append(time.perf_counter())
    trace = RankTrace(rank, socket.gethostname(), clock, began, marks, ends, exchanges=exchanges)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # The profiler's clock is that of the day.
    offset_s = time.time_ns() / 1e9 - time.perf_counter()
    # Else it says on every machine without a GPU that there is none, and in torch 2.15 when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with (
        profile(activities=activities, acc_events=True) as profiler,
        ExchangeLog().watching() as trace.profiled_exchanges,
        progress.marking() as trace.profiled,
    ):
        step(STEPS)
        synchronize(device)
    operations = _operations(profiler, offset_s)
    if device.type == "cuda":
        # The host runs ahead there. What the device did is the step.
        trace.segments = device_segments(trace.profiled, operations)
        trace.ends, trace.began = [trace.profiled[-1].end], trace.profiled[0].begin
    else:
        trace.operation_s, trace.processors = operation_s(), frozenset(os.sched_getaffinity(0))
    trace.work_s, trace.n_operations = work_of(trace.profiled, operations, trace.operation_s)
    if keep:
        trace.operations = operations
    return trace


def _operations(profiler: Any, offset_s: float) -> list[TracedOperation]:
    """Return the operations of the thread that began the step, and all of the device, in order of their beginning."""
    events = [e for e in profiler.profiler.kineto_results.events() if e.duration_ns() > 0]
    on_device = [str(e.device_type()).endswith("CUDA") for e in events]
    threads = [e.start_thread_id() for e, device in zip(events, on_device, strict=True) if not device]
    main = max(set(threads), key=threads.count, default=0)
    operations = []
    for e, device in zip(events, on_device, strict=True):
        if device or e.start_thread_id() == main:
            begin, end = (ns / 1e9 - offset_s for ns in (e.start_ns(), e.start_ns() + e.duration_ns()))
            operations.append(TracedOperation(e.name(), device, begin, end))
    return sorted(operations, key=lambda operation: (operation.begin, -operation.end))


def kind_of(name: str, part: str) -> str | None:
    """Return the kind of work that an operation or a kernel is in a part of the step, None for what is no computation."""
    lower = name.lower()
    # FSDP names ranges of its Python so, and its operations fsdp::copy and the like.
    if name.startswith("FSDP::") or any(
        word in lower for word in ("autograd::", "c10d", "gloo:", "nccl", "memcpy", "memset")
    ):
        return None
    if part == "optimizer":
        return OPTIMIZER
    if any(word in lower for word in ("attention", "flash", "fmha", "sdpa")):
        return ATTENTION
    if any(
        word in lower
        for word in ("aten::mm", "addmm", "bmm", "aten::linear", "gemm", "cutlass", "nvjet", "mkldnn_linear")
    ):
        return PRODUCTS
    return ELEMENTWISE


def work_of(
    segments: list[StepMark], operations: list[TracedOperation], operation_s: float
) -> tuple[dict[str, dict[str, float]], int]:
    """Return the seconds of each kind of work in each computing part, and the number of operations.

    An operation counts without those that it calls. operation_s: what an operation costs that computes nothing.
    """
    work_s = {part: dict.fromkeys(KINDS, 0.0) for part in COMPUTING}
    if kernels := [operation for operation in operations if operation.on_device]:
        # All work of a device is one part, as device_segments has it.
        for kernel in kernels:
            if kind := kind_of(kernel.name, "forward"):
                work_s["forward"][kind] += kernel.end - kernel.begin
        return work_s, len(kernels)
    later = iter(segments)
    segment = next(later, None)
    # The operations that are under way: when each ends, and the part and kind that it counts for.
    calls: list[tuple[float, str, str | None]] = []
    n = 0
    for operation in operations:
        while segment and segment.end < operation.begin and (following := next(later, None)):
            segment = following
        while calls and calls[-1][0] <= operation.begin:
            calls.pop()
        part, seconds = segment.part if segment else "", operation.end - operation.begin
        # An event without a namespace is Python or autograd around the operations.
        kind = kind_of(operation.name, part) if part in work_s and "::" in operation.name else None
        if calls:
            _, caller_part, caller = calls[-1]
            # All that attention calls is attention.
            kind = ATTENTION if caller == ATTENTION else kind
            if caller:
                work_s[caller_part][caller] -= seconds
        if kind:
            n += 1
            work_s[part][kind] += max(0.0, seconds - operation_s)
        calls.append((operation.end, part, kind))
    return {part: {kind: max(0.0, s) for kind, s in of_kinds.items()} for part, of_kinds in work_s.items()}, n


def operation_s() -> float:
    """Return the seconds of an operation on the host that computes next to nothing, but is recorded for a backward."""
    x = torch.ones(1, requires_grad=True)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(100):
            x * x
        times.append((time.perf_counter() - began) / 100)
    return min(times)


def device_segments(host: list[StepMark], operations: list[TracedOperation]) -> list[StepMark]:
    """Return what a GPU did in a step: computing, waiting for a collective, copying, or nothing, as its host was late.

    Where the device does nothing while the host waits for data, a file or the allocator, that is its reason.
    """
    edges: list[tuple[float, str, int]] = []
    for operation in operations:
        if operation.on_device:
            lower = operation.name.lower()
            on_bus = "memcpy htod" in lower or "memcpy dtoh" in lower
            what = "wait" if "nccl" in lower else "bus" if on_bus else "forward"
        elif operation.name in ("cudaMalloc", "cudaFree"):
            what = "allocator"
        else:
            continue
        edges += [(operation.begin, what, 1), (operation.end, what, -1)]
    held_up = [s for s in host if s.part in ("data", "disk")]
    edges += [(t, s.part, change) for s in held_up for t, change in ((s.begin, 1), (s.end, -1))]
    began, ended = host[0].begin, max([host[-1].end, *(t for t, _, _ in edges)])
    running = dict.fromkeys(("forward", "wait", "bus", "data", "disk", "allocator"), 0)
    segments: list[StepMark] = []
    before = began
    for moment, what, change in sorted([*edges, (ended, "forward", 0)]):
        if moment > before:
            active = next((part for part in running if running[part]), "host")
            segments.append(StepMark("forward" if active == "wait" else active, active == "wait", before, moment))
            before = moment
        running[what] += change
    return segments


def host_share(trace: RankTrace, *, threads: bool) -> float:
    """Return the share of all computing parts of a rank together that is the host. A short part may have much more."""
    own_s = _own_s(trace, threads)
    shares = host_shares_of(trace, threads)
    return sum(shares[part] * own_s[part] for part in COMPUTING) / max(sum(own_s.values()), 1e-9)


def profiled_processor(trace: RankTrace, *, threads: bool) -> float:
    """Return the share of its profiled step in which a rank had a processor."""
    own = [m for m in trace.profiled if m.part in COMPUTING and not m.waits]
    wall_s = sum(m.end - m.begin for m in own)
    return min(1.0, sum(m.processor_s for m in own) / wall_s) if threads and wall_s else 1.0


def host_shares_of(trace: RankTrace, threads: bool) -> dict[str, float]:
    """Return the share of each computing part of a rank that is the host."""
    own_s = _own_s(trace, threads)
    if profiled_processor(trace, threads=threads) < PROCESSOR_MIN:
        share = trace.n_operations * trace.operation_s / max(sum(own_s.values()), 1e-9)
        return dict.fromkeys(COMPUTING, min(1.0, share))
    work_s = {part: sum(trace.work_s.get(part, {}).values()) for part in COMPUTING}
    return {
        part: max(0.0, 1 - work_s[part] / own_s[part]) if own_s[part] and work_s[part] else 0.0 for part in COMPUTING
    }


def _own_s(trace: RankTrace, threads: bool) -> dict[str, float]:
    """Return the seconds of a step that a rank computes in each part, with a processor if the marks tell that."""
    own = [mark for mark in trace.segments if not mark.waits]
    return {
        part: sum(m.processor_s if threads else m.end - m.begin for m in own if m.part == part) / len(trace.ends)
        for part in COMPUTING
    }
