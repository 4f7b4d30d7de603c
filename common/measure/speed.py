"""Speed and memory of a run, measured over whole steps.

docs/guides/metrics.md defines every figure.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gptscale.common.measure import flops
from gptscale.common.settings.run_config import Precision
from gptscale.common.settings.shape import ModelConfig

Speed = dict[str, float | None]


@dataclass(frozen=True)
class Memory:
    """Peaks of the memory of this process in GiB.

    allocated_gib, reserved_gib: of the device, None without CUDA. rss_gib: the resident set on the host.
    """

    allocated_gib: float | None
    reserved_gib: float | None
    rss_gib: float


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all the work that was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the mean seconds of one of `count` calls, waiting for the device before and after all of them."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / count


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of the device's peak memory (that of the host cannot be reset)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> Memory:
    """Return the peaks so far: what tensors took, what the allocator reserved, and the resident set of the host."""
    # Linux counts it in KiB.
    rss_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rss_gib = rss_kib / 2**20
    if device.type != "cuda":
        return Memory(None, None, rss_gib)
    return Memory(
        torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30, rss_gib
    )


def speed(
    step_times_s: Sequence[float],
    data_waits_s: Sequence[float],
    *,
    tokens_per_step: int,
    world_size: int,
    gpt: ModelConfig,
    seq_len: int,
    activation_checkpointing: str,
    peak_tflops: float | None,
    precision: Precision = "fp32",
    bf16_peak_tflops: float | None = None,
) -> Speed:
    """Return the columns of a row that sum up timed steps, none without one.

    Rates are from the median step, so that one slow step does not move them. A figure is None where a peak is unknown. fp8 has
    two columns of its own in place of those from tflops_per_device to handout_tflops. tflops_per_device counts as `mfu` does.
    data_wait_fraction is the time spent waiting for batches, divided by the time of all steps. peak_tflops: the peak of the
    device in `precision`. bf16_peak_tflops: its peak in bf16, used only for fp8.
    """
    if not step_times_s:
        return {}
    p10, median, p90 = (float(q) for q in np.quantile(step_times_s, (0.1, 0.5, 0.9)))
    tokens_per_s = tokens_per_step / median
    per_device = tokens_per_s / world_size

    def tflops(flops_per_token: float) -> float:
        return per_device * flops_per_token / 1e12

    def utilisation(flops_per_token: float) -> float | None:
        return None if peak_tflops is None else tflops(flops_per_token) / peak_tflops

    model = flops.model_flops_per_token(gpt, seq_len)
    measured: Speed = {"step_time_s_median": median, "step_time_s_p10": p10, "step_time_s_p90": p90}
    measured |= {"tokens_per_s": tokens_per_s, "tokens_per_s_per_device": per_device}
    measured |= {"data_wait_fraction": sum(data_waits_s) / sum(step_times_s)}
    if precision == "fp8":
        mixed = fp8_seconds_per_token(gpt, seq_len, peak_tflops, bf16_peak_tflops)
        used = None if mixed is None else mixed * per_device
        return measured | {"fp8_tflops_per_device": tflops(model), "fp8_mixed_utilisation": used}
    return measured | {
        "tflops_per_device": tflops(model),
        "mfu": utilisation(model),
        "mfu_palm": utilisation(flops.palm_flops_per_token(gpt, seq_len)),
        "hfu": utilisation(flops.hardware_flops_per_token(gpt, seq_len, activation_checkpointing)),
        "handout_tflops": tflops(flops.handout_flops_per_token(gpt)),
    }


def fp8_seconds_per_token(
    gpt: ModelConfig, seq_len: int, fp8_peak_tflops: float | None, bf16_peak_tflops: float | None
) -> float | None:
    """Return the seconds that the operations of one token take at the dense peaks of fp8 and bf16, None without both peaks.

    The matrix products of the blocks count at the fp8 peak, attention and the head at the bf16 peak. Operations are those of
    `model_flops_per_token`.
    """
    if fp8_peak_tflops is None or bf16_peak_tflops is None:
        return None
    blocks = 6.0 * gpt.n_layer * sum(gpt.block_matrices)
    rest = flops.model_flops_per_token(gpt, seq_len) - blocks
    return (blocks / fp8_peak_tflops + rest / bf16_peak_tflops) / 1e12
