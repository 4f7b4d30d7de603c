"""How fast a folder's disk is through DeepSpeed's own file I/O, and whether it would starve a step of zero_infinity."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from gptscale.common.engines.zero import operators as deepspeed_ops
from gptscale.common.engines.zero.swap_folder import check_folder
from gptscale.common.measure.flops import model_flops_per_token
from gptscale.common.measure.speed import timed
from gptscale.common.settings.shape import ModelConfig

# bytes of one file; there are several, so that a cache in the disk does not decide
FILE_BYTES = 2**28
N_FILES = 4
# bytes of a weight that is computed with, in bf16
WEIGHT_BYTES = 2
# side of the matrices whose product is the roof of arithmetic on a CPU
SQUARE = 1024


def measure(folder: Path) -> dict[str, float]:
    """Write and read 1 GiB in files that are deleted again, and return the GiB/s of both.

    They are read and written through DeepSpeed's aio_handle, with O_DIRECT where the file system has it.
    Raises ConfigError for a folder that is missing, not writable or too full, or when async_io is not compiled.
    """
    check_folder(folder, FILE_BYTES * N_FILES)
    if lack := deepspeed_ops.lack(("pin_memory", "async_io")):
        raise lack
    deepspeed_ops.load(("pin_memory", "async_io"))
    from deepspeed.ops.op_builder import AsyncIOBuilder

    module = AsyncIOBuilder().load()
    # block size, queue depth, single submit, overlap, threads
    handle = module.aio_handle(2**20, 32, False, True, 4)
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
    return {"read_gib_per_s": gib / read_s, "write_gib_per_s": gib / written_s}


def gemm_tflops(device: torch.device) -> float:
    """Return the TFLOP/s of a matrix product in bf16, on a CPU in fp32."""
    return matmul_rate(torch.bfloat16 if device.type == "cuda" else torch.float32, device) / 1e3


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the GFLOP/s of a square matrix product, the median of nine."""
    side = SQUARE if device.type == "cpu" else 8 * SQUARE
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    timed(lambda: a @ b, 2, device)
    return 2 * side**3 / statistics.median(timed(lambda: a @ b, 1, device) for _ in range(9)) / 1e9


def verdict(gpt: ModelConfig, disk: dict[str, float], tflops: float) -> str:
    """Return in words how many tokens an optimizer step needs on this machine so that it does not wait for the disk.

    With b bytes of a weight, a step reads optimizer state, gradients and twice the weights, (12 + 4 + 2b) N bytes, and writes
    them once, (12 + 4 + b) N bytes (ZeRO-Infinity, arXiv 2104.07857, section 4, with one micro-batch).
    """
    n = gpt.n_params_in_memory
    read_s = (16 + 2 * WEIGHT_BYTES) * n / 2**30 / disk["read_gib_per_s"]
    write_s = (16 + WEIGHT_BYTES) * n / 2**30 / disk["write_gib_per_s"]
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
