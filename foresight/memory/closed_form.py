"""Bytes that a training step will need on the device, on the host and on disk, from the model's shape alone.

Korthikanti et al. 2022 (arXiv 2205.05198, section 4) count what a block keeps for backward: 34 h bytes per token in 16 bits,
and 5 a T bytes of attention. Here attention keeps one number per head and token instead (Dao et al. 2022, arXiv 2205.14135),
there is no dropout (its masks are 2 h), the residual stream may be fp32, and the loss never holds all logits (model/loss.py).
State is counted as in Rajbhandari et al. 2020 (arXiv 1910.02054, section 3). What an allocator rounds, splits and keeps is not
in it.

This module imports nothing heavy, so that planning stays fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.run_config import MOMENT_BYTES

if TYPE_CHECKING:
    from gptscale.common.recipe_config import RecipeConfig
    from gptscale.common.settings.run import Run

# of common/model/loss.py, which imports torch; a test holds them together
LOGITS_BYTES = {"cpu": 2**28, "cuda": 2**30}
# Bytes alive per logit of a block of rows, by device and by the bytes of a number in products. Gradients take the logits' place,
# on a CPU in fp32.
LOGIT_COPIES = {"cpu": {4: 4, 2: 6}, "cuda": {4: 4, 2: 2}}
# elements of DeepSpeed's reduce bucket (recipes/zero.py)
BUCKET = 50_000_000
# elements that ZeRO-Infinity steps at once, DeepSpeed's default
SUB_GROUP = 1_000_000_000
# buffers of a sub-group, DeepSpeed's default
SWAP_BUFFERS = 4
# buffers of the largest weight (recipes/zero.py)
WEIGHT_BUFFERS = 8
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


@dataclass(frozen=True)
class Step:
    """A step of one micro-batch of `tokens`, where 0 leaves what does not depend on the batch.

    precision: fp32, bf16 or fp16. device_type: cpu or cuda.
    """

    gpt: GPTConfig
    tokens: int
    precision: str
    device_type: str

    @property
    def compute(self) -> int:
        """Return the bytes of a number in products."""
        return 4 if self.precision == "fp32" else 2

    @property
    def table(self) -> int:
        """Return the parameters of the token table."""
        return self.gpt.padded_vocab_size * self.gpt.n_embd

    @property
    def block(self) -> int:
        """Return the parameters of a block."""
        return 12 * self.gpt.n_embd**2 + 13 * self.gpt.n_embd


@dataclass(frozen=True)
class RecipeBytes:
    """The bytes that a recipe needs whatever the batch.

    device: all the time. gradients: on the device at the end of backward, or, with at_once, from its first block on. casts: of
    weights, while a forward lasts. working: during the backward of a block. build: at most, while the engine is built. residual,
    norm_input: bytes of a number in the residual stream, and of one that a LayerNorm keeps.
    """

    device: float
    gradients: float = 0.0
    at_once: bool = False
    casts: float = 0.0
    working: float = 0.0
    build: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    residual: int = 4
    norm_input: int = 4


def need(step: Step, way: WayToFit) -> Need:
    """Return the peak bytes of `step` done in `way`, or raise KeyError for a recipe that is not in RECIPES.

    Besides the building of the engine, the peak is the highest of five moments: inside the loss, when backward begins, in the
    last block's backward, in the first block's, and when the table's two gradients are added. Between the last and the first
    block it lies on a straight line, because what blocks keep falls while gradients grow.
    """
    fixed = RECIPES[way.recipe](step, MOMENT_BYTES[way.optimizer_state])
    gpt, t, table = step.gpt, step.tokens, 4 * step.table
    kept = kept_per_token(step, fixed, way.activation_checkpointing) * t
    # the last norm keeps its input too
    all_kept = gpt.n_layer * kept + fixed.residual * gpt.n_embd * t
    at_work = fixed.working + working_per_token(step, fixed, way.activation_checkpointing) * t
    # with checkpointing they are gone when autocast ends
    casts = fixed.casts if way.activation_checkpointing == "none" else 0.0
    first_gradients = fixed.gradients * (1.0 if fixed.at_once else step.block / gpt.n_params_in_memory)
    device = max(
        fixed.build,
        fixed.device + fixed.casts + all_kept + loss_bytes(step, fixed),
        fixed.device + casts + all_kept + 2 * (table + fixed.norm_input * gpt.n_embd * t),
        fixed.device + casts + all_kept + at_work + table + first_gradients,
        fixed.device + fixed.gradients + kept + at_work,
        fixed.device + fixed.gradients + table + fixed.residual * gpt.n_embd * t,
    )
    return Need(device, fixed.host, fixed.disk)


def kept_per_token(step: Step, fixed: RecipeBytes, mode: str) -> float:
    """Return the bytes that one block keeps for backward, per token.

    With mode none these are the inputs of the two norms, of qkv, of the projection (attention's output), of fc, of GELU and of
    fc-out, and q, k and v. With full it is the block's input. With selective it is that, and the outputs of its four products and
    of attention.
    """
    h, c, heads = step.gpt.n_embd, step.compute, step.gpt.n_head
    # attention's log-sum-exp, and mean and deviation of two norms
    sums, statistics = 4 * heads, 2 * 2 * 4
    if mode == "full":
        return fixed.residual * h
    if mode == "selective":
        return fixed.residual * h + c * h * (3 + 1 + 4 + 1) + c * _padded(step) + sums
    return 2 * fixed.norm_input * h + c * h * (1 + 1 + 4 + 4) + c * _attention(step) + sums + statistics


def working_per_token(step: Step, fixed: RecipeBytes, mode: str) -> float:
    """Return the bytes per token that the backward of one block needs beyond what is kept.

    They are what is computed again, and gradients under way.
    """
    h, c = step.gpt.n_embd, step.compute
    under_way = fixed.residual * h + (c * h if fixed.residual != c else 0) + 4 * c * h
    if mode == "none":
        return under_way
    again = kept_per_token(step, fixed, "none")
    if fixed.norm_input == fixed.residual:
        # the first norm's input is the block's, which is there
        again -= fixed.residual * h
    if mode == "selective":
        # of padded heads q, k and v are computed again
        padded = _padded(step)
        again -= c * (4 * h + padded + (3 * h if padded == h else 0))
    return again + under_way


def loss_bytes(step: Step, fixed: RecipeBytes) -> float:
    """Return the bytes inside the loss: the head's input and gradient, the table's gradient, one block's logits."""
    gpt, c = step.gpt, step.compute
    cast = c if c != fixed.norm_input else 0
    table = (4 + cast) * step.table
    counted = 4 if step.device_type == "cpu" else c
    most = max(1, LOGITS_BYTES[step.device_type] // (counted * gpt.padded_vocab_size))
    blocks = max(1, -(-step.tokens // most))
    copies = LOGIT_COPIES[step.device_type][c]
    rows = (2 * fixed.norm_input + cast) * gpt.n_embd * step.tokens
    return rows + table + copies * (step.tokens / blocks) * gpt.padded_vocab_size


def _padded(step: Step) -> int:
    """Return the numbers in attention's output per token, where on CUDA heads are padded to a multiple of 8."""
    d = step.gpt.head_dim
    return step.gpt.n_head * (-(-d // 8) * 8 if step.device_type == "cuda" else d)


def _attention(step: Step) -> int:
    """Return the numbers that attention and the projection behind it keep per token.

    They are q, k, v and the output, which is kept twice if heads are padded.
    """
    padded, h = _padded(step), step.gpt.n_embd
    return 4 * padded + (h if padded != h else 0)


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
        host=_pinned(step, (n,), 4) + (SWAP_BUFFERS + 1) * 4 * sub_group + WEIGHT_BUFFERS * c * step.table,
        disk=(4 + moments + 4 + c) * n,
        residual=c,
        norm_input=c,
    )


RECIPES = {
    "single": _single,
    "fsdp_offload": _fsdp_offload,
    "zero_offload": _zero_offload,
    "zero_infinity": _zero_infinity,
}


def predict(run: Run, recipe_config: RecipeConfig) -> dict[str, int]:
    """Return bytes by owner."""
    return {"parameter": int(run.state_bytes)}
