"""Where a step's time goes, by torch's profiler: matrix products, attention, elementwise work, loss, optimizer, gaps.

On a CPU an operator's own time counts, on CUDA that of the kernels that it launched. The gap between their sum and the wall time
is the host's own work and the time in which a device waits for it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import record_function

from benchmarks.model.ceilings import PARTS
from gptscale.common.engines.torch_engine import TorchEngine
from gptscale.common.measure.speed import synchronize

# the ranges that `annotate` adds to a trace, and their part
RANGES = {"gptscale bench: loss": "loss", "gptscale bench: optimizer": "optimizer"}
# operators in a trace of a CPU; anything else there is the host's own work
OPERATOR = re.compile(r"aten::|mkldnn::|gptscale::|triton|.*cpp_fused")

# Names of operators and kernels, searched in lower case, of which the first that fits counts. Products of the head are products,
# though they are computed inside the loss, and attention's own products are attention.
NAMES = (
    ("attention", re.compile(r"scaled_dot_product|flash|fmha|attention|sdpa")),
    (
        "matrix products",
        re.compile(
            r"^aten::_?(mm|scaled_mm|addmm|bmm|baddbmm|linear|matmul)|gemm|cutlass|cublas|nvjet|xmma|mkl|triton_tem"
        ),
    ),
    ("optimizer", re.compile(r"adam|multi_tensor|foreach")),
)
# kernels launched from Python, inside none of torch's operators, and their part
FROM_PYTHON = {"_cross_entropy_kernel": "loss"}


def annotate(engine: TorchEngine) -> None:
    """Mark the engine's loss and its optimizer's step in the traces to come."""
    model: Any = engine.model
    optimizer: Any = engine.optimizer
    loss_range, optimizer_range = RANGES
    model.loss.forward = _marked(loss_range, model.loss.forward)
    optimizer.step = _marked(optimizer_range, optimizer.step)


def _marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def marked(*args: Any, **options: Any) -> Any:
        with record_function(name):
            return function(*args, **options)

    return marked


def part_of(names: Sequence[str], ranges: Sequence[str]) -> str | None:
    """Return the part that an operator or kernel belongs to, or None for the host's own work.

    names: of the operator and, on CUDA, of its kernel. ranges: those of RANGES around it, the innermost first.
    """
    for part, pattern in NAMES:
        if any(pattern.search(name.lower()) for name in names):
            return part
    on_device = len(names) > 1
    if not on_device and not OPERATOR.match(names[0]):
        return None
    return RANGES[ranges[0]] if ranges else "elementwise"


def where_time_goes(steps: Sequence[Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Run the steps and return the seconds per step of each of PARTS, whose sum is the wall time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profile:
        began = time.perf_counter()
        for step in steps:
            step()
        synchronize(device)
        wall_s = time.perf_counter() - began
    parts = dict.fromkeys(PARTS, 0.0)
    for part, microseconds in work(profile.events() or [], device):
        parts[part] += microseconds * 1e-6 / len(steps)
    parts["gaps"] = max(0.0, wall_s / len(steps) - sum(parts.values()))
    return parts


def work(events: Sequence[Any], device: torch.device) -> Iterator[tuple[str, float]]:
    """Yield (part, microseconds) of every operator or kernel in a trace."""
    launched = {k.name for event in events if event.device_type == DeviceType.CPU for k in event.kernels}
    for event in events:
        if event.device_type != DeviceType.CPU:
            # A kernel is counted at the operator that launched it, where its ranges are known.
            if event.name in FROM_PYTHON and event.name not in launched:
                yield FROM_PYTHON[event.name], float(event.time_range.elapsed_us())
            continue
        ranges = ranges_around(event)
        timings: list[tuple[tuple[str, ...], float]] = []
        if device.type == "cpu":
            timings.append(((event.name,), event.self_cpu_time_total))
        else:
            timings += [((event.name, kernel.name), kernel.duration) for kernel in event.kernels]
        for names, microseconds in timings:
            if (part := part_of(names, ranges)) is not None:
                yield part, float(microseconds)


def ranges_around(event: Any) -> list[str]:
    """Return those of RANGES around an operator, the innermost first.

    A range counts as around itself, because a kernel that no operator launched hangs at it.
    """
    ranges, parent = [], event
    while parent is not None:
        if parent.name in RANGES:
            ranges.append(parent.name)
        parent = parent.cpu_parent
    return ranges
