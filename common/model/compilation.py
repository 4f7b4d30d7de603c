"""Compilation of a model's blocks by torch.compile."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run import Run

# The modes of torch.compile that record the kernels of a block once and replay them at fixed addresses.
CUDA_GRAPHS = ("max-autotune", "reduce-overhead")


def check_compile(run: Run) -> None:
    """Raise ConfigError for a compile mode without compilation, or for CUDA graphs without CUDA."""
    mode, where = run.config.compile_mode, "in --compile-mode"
    if mode != "default" and not run.config.compile:
        raise ConfigError(f"compile_mode {mode} without compile means nothing", where, "add --compile")
    if mode in CUDA_GRAPHS and run.world.device.type != "cuda":
        raise ConfigError(f"compile_mode {mode} needs CUDA", where, "use max-autotune-no-cudagraphs or default")


def apply_compile(blocks: Iterable[nn.Module], mode: str = "default") -> None:
    """Compile the forward of each block, in place.

    A block is one small graph. It is compiled once and shared by all blocks of the same shapes. Parameter names do not change.
    mode: as in torch.compile. With one of CUDA_GRAPHS the engine must call torch.compiler.cudagraph_mark_step_begin() before each
    step, since the outputs of a block, among them gradients of weights, lie where those of the next step will.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, mode=mode)
