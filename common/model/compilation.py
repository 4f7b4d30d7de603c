"""Compilation of a model's blocks by torch.compile."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run_config import RunConfig

CUDA_GRAPHS = ("max-autotune", "reduce-overhead")  # modes of torch.compile that replay kernels at fixed addresses


def check_compile(config: RunConfig, device: torch.device) -> None:
    """ConfigError for a mode of compilation without compilation, or of CUDA graphs without CUDA."""
    mode, where = config.compile_mode, "in --compile-mode"
    if mode != "default" and not config.compile:
        raise ConfigError(f"compile_mode {mode} without compile means nothing", where, "add --compile")
    if mode in CUDA_GRAPHS and device.type != "cuda":
        raise ConfigError(f"compile_mode {mode} needs CUDA", where, "use max-autotune-no-cudagraphs or default")


def apply_compile(blocks: Iterable[nn.Module], mode: str = "default") -> None:
    """`torch.compile` each block's forward: one small graph, compiled once and shared by all blocks of a shape.

    mode: torch's. With one of CUDA_GRAPHS the engine must say where a step begins (torch.compiler.cudagraph_mark_step_begin):
    outputs of blocks, gradients of weights among them, live where the next step's will.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, mode=mode)
