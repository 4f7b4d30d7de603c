"""How `gptscale bench parts` compares and times the ways of computing a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gptscale.common.measure.speed import synchronize
from gptscale.common.process.ending import is_out_of_memory
from gptscale.launchers.bench.measurement import tell
from gptscale.launchers.bench.parts.ways import StepPart, StepShape, WayToCompute
from gptscale.launchers.bench.timing import medians

# Of the largest entry: products round in different places, in 16 bits by 2^-8 and 2^-11 each time.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def measure_part(make: Callable[[StepShape], StepPart], shape: StepShape) -> Iterator[dict[str, Any]]:
    """Yield a row for each way of a part: what is wrong with it, or its times."""
    # the compiler's limit of compilations counts over all parts
    torch.compiler.reset()
    part = make(shape)
    tell(f"{part.name}: {len(part.ways)} ways")
    failures, errors = compare(part.ways, TOLERANCE[shape.dtype], shape.device)
    running = [way for way in part.ways if not failures[way.name]]
    peaks = {way.name: peak_gib(way.run, shape.device) for way in running}
    calls: dict[tuple[str, str], Callable[[], object]] = {(way.name, "both"): way.run for way in running}
    calls |= {(way.name, "forward"): way.forward for way in running if way.forward is not None}
    times = medians(calls, shape.device)
    first = times.get((part.ways[0].name, "both"))
    for way in part.ways:
        row: dict[str, Any] = {
            "part": part.name,
            "way": way.name,
            "failure": failures[way.name],
            "error": errors.get(way.name),
        }
        if both := times.get((way.name, "both")):
            forward = times.get((way.name, "forward"))
            row |= {
                "forward_ms": None if forward is None else forward * 1e3,
                "both_ms": both * 1e3,
                "over_first": None if first is None else both / first,
                "peak_gib": peaks[way.name],
                "gb_per_s": part.bytes / both / 1e9 or None,
                "tflops": part.flops / both / 1e12 or None,
            }
        yield row


def compare(
    ways: Sequence[WayToCompute], tolerance: float, device: torch.device
) -> tuple[dict[str, str], dict[str, float]]:
    """Return why each way is not timed (empty if it is), and how far it is from the first that runs.

    The distance is over the largest entry, and must be at most `tolerance`.
    """
    failures, errors = {}, {}
    expected: Sequence[Tensor] | None = None
    for way in ways:
        try:
            values = [t.detach().clone() for t in (way.result or way.run)()]
            synchronize(device)
        except Exception as error:
            # There is no memory, or a kernel does not take this shape. Triton's errors are no RuntimeError.
            failures[way.name] = "out of memory" if is_out_of_memory(error) else first_line(error)
            continue
        expected = expected or values
        errors[way.name] = distance = max(apart(a, b) for a, b in zip(values, expected, strict=True))
        # a comparison with NaN is false
        if distance <= tolerance:
            failures[way.name] = ""
        else:
            failures[way.name] = f"differs by {distance:.2g} of the largest, more than {tolerance:g}"
    return failures, errors


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, behind the error's class unless that says nothing."""
    first = str(error).strip().partition("\n")[0]
    return (first if first and type(error) is RuntimeError else f"{type(error).__name__}: {first}")[:100]


def apart(values: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected value."""
    largest = expected.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((values.float() - expected.float()).abs().max() / largest)


def peak_gib(run: Callable[[], object], device: torch.device) -> float:
    """Return the most GiB that a call allocates beyond what was allocated before.

    They are counted by torch's allocator on CUDA, and by its profiler on a CPU.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**30
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most / 2**30
