"""Speed and memory of a run, measured over whole steps.

docs/guides/metrics.md defines every figure.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gptscale.common.measure import flops
from gptscale.common.measure.devices import peak_tflops
from gptscale.common.settings.run import Run
from gptscale.common.settings.shape import ModelConfig

# Figures of a run by the columns of its row. One that cannot be told is None.
Figures = dict[str, float | None]


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


def peak_memory(device: torch.device) -> Figures:
    """Return the peaks of this process so far: what tensors took, what the allocator reserved, and its resident set."""
    allocated = reserved = None
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device) / 2**30
        reserved = torch.cuda.max_memory_reserved(device) / 2**30
    # Linux counts it in KiB.
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"peak_mem_allocated_gib": allocated, "peak_mem_reserved_gib": reserved, "peak_rss_gib": rss}


def speed(run: Run, device: str, step_times_s: Sequence[float], data_waits_s: Sequence[float]) -> Figures:
    """Return the columns of a row that sum up timed steps, none without one. device: its name.

    Rates are from the median step, so that one slow step does not move them. A figure is None where a peak is unknown. fp8 has
    two columns of its own in place of those from tflops_per_device to handout_tflops. tflops_per_device counts as `mfu` does.
    data_wait_fraction is the time spent waiting for batches, divided by the time of all steps.
    """
    if not step_times_s:
        return {}
    gpt, seq_len, config = run.gpt, run.seq_len, run.config
    p10, median, p90 = (float(q) for q in np.quantile(step_times_s, (0.1, 0.5, 0.9)))
    tokens_per_s = run.tokens_per_step / median
    per_device = tokens_per_s / run.world.world_size
    peak = peak_tflops(device, config.precision)

    def tflops(flops_per_token: float) -> float:
        return per_device * flops_per_token / 1e12

    def utilisation(flops_per_token: float) -> float | None:
        return None if peak is None else tflops(flops_per_token) / peak

    model = flops.model_flops_per_token(gpt, seq_len)
    measured: Figures = {"step_time_s_median": median, "step_time_s_p10": p10, "step_time_s_p90": p90}
    measured |= {"tokens_per_s": tokens_per_s, "tokens_per_s_per_device": per_device}
    measured |= {"data_wait_fraction": sum(data_waits_s) / sum(step_times_s)}
    if config.precision == "fp8":
        mixed = fp8_seconds_per_token(gpt, seq_len, peak, peak_tflops(device, "bf16"))
        used = None if mixed is None else mixed * per_device
        return measured | {"fp8_tflops_per_device": tflops(model), "fp8_mixed_utilisation": used}
    return measured | {
        "tflops_per_device": tflops(model),
        "mfu": utilisation(model),
        "mfu_palm": utilisation(flops.palm_flops_per_token(gpt, seq_len)),
        "hfu": utilisation(flops.hardware_flops_per_token(gpt, seq_len, config.activation_checkpointing)),
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
