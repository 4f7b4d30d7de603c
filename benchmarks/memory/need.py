"""The bytes that one process needs in each way that `python -m benchmarks.memory` tries.

State is counted as in Rajbhandari et al. 2020 (arXiv 1910.02054, section 3). What an allocator rounds, splits and keeps is not
in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gptscale.common.settings.optimizers import OPTIMIZERS
from gptscale.foresight.memory.closed_form import moments
from gptscale.foresight.memory.step import RecipeBytes, Step
from gptscale.foresight.memory.world_bytes import BUCKET, WEIGHT_BUFFERS, Layout

# elements that ZeRO-Infinity steps at once, DeepSpeed's default
SUB_GROUP = 1_000_000_000
# buffers of a sub-group, DeepSpeed's default
SWAP_BUFFERS = 4
# blocks whose weights are on the device when they live on the host: the one at work and its neighbours
GATHERED_BLOCKS = 3


class WayToFit(NamedTuple):
    """How a model is made to fit: a recipe, what its blocks keep for backward, and the moments' precision."""

    recipe: str
    activation_checkpointing: str = "full"
    optimizer_state: str = "fp32"

    def __str__(self) -> str:
        return "/".join(self)


class Need(NamedTuple):
    """Peak bytes of one process, whose device and host are one memory on a CPU."""

    device: float
    host: float
    disk: float


def _pinned(step: Step, numels: Iterable[int], width: int) -> float:
    """Return the bytes of host tensors of `numels` elements of `width` bytes.

    On CUDA torch pins them, each rounded up to a power of two (CachingHostAllocator.h).
    """
    sizes = [width * n for n in numels]
    if step.device_type == "cuda":
        sizes = [1 << (size - 1).bit_length() for size in sizes]
    return float(sum(sizes))


def _single(step: Step, moments: float) -> RecipeBytes:
    n, c = step.gpt.n_params_in_memory, step.compute
    lowered = c if c != 4 else 0
    return RecipeBytes(
        device=(4 + moments) * n,
        gradients=4 * n,
        casts=lowered * step.block * step.gpt.n_layer,
        # casts of one block, and its gradients before they are fp32
        working=2 * lowered * step.block,
    )


def _fsdp_offload(step: Step, moments: float) -> RecipeBytes:
    """Return the bytes of fsdp_offload.

    Root weights stay gathered. A block's fp32 shards come over, are cast and gathered. Gradients are reduced in fp32.
    """
    gpt, c, h = step.gpt, step.compute, step.gpt.n_embd
    root, matrices = step.table + gpt.block_size * h + 2 * h, (3 * h * h, h * h, 4 * h * h, 4 * h * h, 13 * h)
    parameters = [*(matrices * gpt.n_layer), step.table, gpt.block_size * h, 2 * h]
    return RecipeBytes(
        device=c * root + (GATHERED_BLOCKS * c + 4) * step.block,
        gradients=(c + 4) * root,
        working=(c + 2 * 4) * step.block,
        host=2 * _pinned(step, parameters, 4) + moments * gpt.n_params_in_memory,
        residual=c,
    )


def _zero_offload(step: Step, moments: float) -> RecipeBytes:
    """Return the bytes of zero_offload, which is DeepSpeed's stage 2.

    Weights are on the device, with products in 16 bits also all gradients in fp32 until the step. The rest is on the host,
    pinned.
    """
    n, c = step.gpt.n_params_in_memory, step.compute
    groups = (n - 13 * step.gpt.n_embd * step.gpt.n_layer, 13 * step.gpt.n_embd * step.gpt.n_layer)
    bucket = min(BUCKET, step.gpt.n_params // 8)
    return RecipeBytes(
        device=c * n + c * bucket + 2 * c * step.table,
        gradients=4 * n if c != 4 else 0,
        at_once=True,
        working=c * step.block,
        # the weights, their copy, and that copy in fp32 on its way to the host
        build=(2 * c + 4) * n,
        host=2 * _pinned(step, groups, 4) + _pinned(step, groups, c) + moments * n + c * step.table,
        residual=c,
        norm_input=c,
    )


def _zero_infinity(step: Step, moments: float) -> RecipeBytes:
    """Return the bytes of zero_infinity, which is DeepSpeed's stage 3.

    Weights come from files. fp32 gradients pass through host memory, and so does a sub-group of state at a time.
    """
    n, c = step.gpt.n_params_in_memory, step.compute
    sub_group, bucket = min(n, SUB_GROUP + step.table), min(BUCKET, step.gpt.n_params // 8)
    return RecipeBytes(
        device=c * (step.table + GATHERED_BLOCKS * step.block) + 2 * 4 * bucket + (c + 4) * step.table,
        working=c * step.block,
        host=_pinned(step, (n,), 4) + (SWAP_BUFFERS + 1) * 4 * sub_group + WEIGHT_BUFFERS * c * step.gpt.largest_weight,
        disk=(4 + moments + 4 + c) * n,
        residual=c,
        norm_input=c,
    )


# The ways of one process.
RECIPES = {
    "single": _single,
    "fsdp_offload": _fsdp_offload,
    "zero_offload": _zero_offload,
    "zero_infinity": _zero_infinity,
}


def need(step: Step, way: WayToFit) -> Need:
    """Return the peak bytes of `step` done in `way`, or raise KeyError for a recipe that is not in RECIPES."""
    fixed = RECIPES[way.recipe](step, OPTIMIZERS["adamw"].state_bytes[way.optimizer_state])
    alone = Layout(n_blocks=step.gpt.n_layer, n_params=step.gpt.n_params_in_memory)
    highest = max(sum(moment.values()) for moment in moments(step, fixed, way.activation_checkpointing, alone))
    return Need(max(fixed.build, fixed.device + highest), fixed.host, fixed.disk)
