"""How fast a folder's disk is through DeepSpeed's own file I/O, and whether it would starve a step of zero_infinity."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from gptscale.common.engines.zero import operators as deepspeed_ops
from gptscale.common.engines.zero.swap_folder import check_folder
from gptscale.common.measure.flops import model_flops_per_token
from gptscale.common.settings.gpt_config import GPTConfig

FILE_BYTES = 2**28  # one file; several, so that a cache in the disk does not decide
N_FILES = 4
WEIGHT_BYTES = 2  # of the weights computed with, in bf16


@dataclass(frozen=True)
class DiskSpeed:
    """GiB/s through DeepSpeed's aio_handle, O_DIRECT where the file system has it."""

    read_gib_per_s: float
    write_gib_per_s: float


def measure(folder: Path) -> DiskSpeed:
    """Write and read 1 GiB in files that are deleted again.

    Raises ConfigError for a folder that is missing, not writable or too full, or when async_io is not compiled.
    """
    check_folder(folder, FILE_BYTES * N_FILES)
    if lacking := deepspeed_ops.lack(("pin_memory", "async_io")):
        raise lacking
    deepspeed_ops.load(("pin_memory", "async_io"))
    from deepspeed.ops.op_builder import AsyncIOBuilder

    module = AsyncIOBuilder().load()
    handle = module.aio_handle(2**20, 32, False, True, 4)  # block size, queue depth, single submit, overlap, threads
    buffer = handle.new_cpu_locked_tensor(FILE_BYTES, torch.empty(0, dtype=torch.uint8))
    buffer.random_(0, 255)
    files = [folder / f".gptscale-doctor-{i}.tmp" for i in range(N_FILES)]
    try:
        began = time.perf_counter()
        for file in files:
            handle.sync_pwrite(buffer, str(file), 0)
        written_s = time.perf_counter() - began
        began = time.perf_counter()
        for file in files:
            handle.sync_pread(buffer, str(file), 0)
        read_s = time.perf_counter() - began
    finally:
        for file in files:
            file.unlink(missing_ok=True)
    gib = FILE_BYTES * N_FILES / 2**30
    return DiskSpeed(gib / read_s, gib / written_s)


def gemm_tflops(device: torch.device, seconds: float = 1.0) -> float:
    """What the device's matrix products reach in bf16 (fp32 on a CPU), measured for about `seconds`."""
    n, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    (a @ b).sum().item()
    runs, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            a @ b
        (a @ b).sum().item()
        runs += 11
    return 2 * n**3 * runs / (time.perf_counter() - began) / 1e12


def verdict(gpt: GPTConfig, disk: DiskSpeed, tflops: float) -> str:
    """How many tokens an optimizer step needs on this machine before the disk is not what it waits for.

    A step reads optimizer state, gradients and twice the weights, (12 + 4 + 2b) N bytes, and writes them once,
    (12 + 4 + b) N (ZeRO-Infinity, arXiv 2104.07857, section 4, with one micro-batch).
    """
    n = gpt.n_params_in_memory
    read_s = (16 + 2 * WEIGHT_BYTES) * n / 2**30 / disk.read_gib_per_s
    write_s = (16 + WEIGHT_BYTES) * n / 2**30 / disk.write_gib_per_s
    tokens = (read_s + write_s) * tflops * 1e12 / model_flops_per_token(gpt, gpt.block_size)
    gib = (32 + 3 * WEIGHT_BYTES) * n / 2**30
    moved = f"a step of zero_infinity on one device moves {gib:,.0f} GiB in {read_s + write_s:,.1f} s"
    if tokens <= gpt.block_size:
        return f"{moved}; at {tflops:,.2f} TFLOP/s one sequence takes longer: the disk keeps up"
    sequences = -(-tokens // gpt.block_size)
    return (
        f"{moved}; at {tflops:,.2f} TFLOP/s it starves unless a step has {sequences:,.0f} sequences or more "
        f"({sequences * gpt.block_size:,.0f} tokens: raise --grad-accum-steps)"
    )
