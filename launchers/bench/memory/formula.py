"""Bytes that a training step will need on the device, on the host and on disk, from the model's shape alone.

Korthikanti et al. 2022 (arXiv 2205.05198, section 4) count what a block keeps for backward: 34 h bytes per token in 16 bits,
and 5 a T bytes of attention. Here attention keeps one number per head and token instead (Dao et al. 2022, arXiv 2205.14135),
there is no dropout (its masks are 2 h), the residual stream may be fp32, and the loss never holds all logits (model/loss.py).
State is counted as in Rajbhandari et al. 2020 (arXiv 1910.02054, section 3). What an allocator rounds, splits and keeps is not
in it.
Imports nothing heavy, so that planning stays fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.run_config import MOMENT_BYTES

# of common/model/loss.py, which imports torch; a test holds them together
LOGITS_BYTES = {"cpu": 2**28, "cuda": 2**30}
# Bytes alive per logit of a block of rows, for products in 4 and in 2 bytes: gradients take the logits' place, on a CPU in fp32
LOGIT_COPIES = {"cpu": {4: 4, 2: 6}, "cuda": {4: 4, 2: 2}}
BUCKET = 50_000_000  # elements of DeepSpeed's reduce bucket (recipes/zero.py)
SUB_GROUP = 1_000_000_000  # elements that ZeRO-Infinity steps at once, DeepSpeed's default
SWAP_BUFFERS, WEIGHT_BUFFERS = 4, 8  # of a sub-group, DeepSpeed's default; of the largest weight, recipes/zero.py
GATHERED_BLOCKS = 3  # whose weights are on the device when they live on the host: the one at work, its neighbours


class Way(NamedTuple):
    """How a model is made to fit: a recipe, what its blocks keep for backward, and the moments' precision."""

    recipe: str
    activation_checkpointing: str = "full"
    optimizer_state: str = "fp32"

    def __str__(self) -> str:
        return "/".join(self)


class Need(NamedTuple):
    """Peak bytes of one process; device and host are one memory on a CPU."""

    device: float
    host: float
    disk: float


@dataclass(frozen=True)
class Step:
    """A step of one micro-batch of `tokens`; 0 leaves what does not depend on the batch. precision: fp32, bf16 or fp16.

    device_type: cpu or cuda.
    """

    gpt: GPTConfig
    tokens: int
    precision: str
    device_type: str

    @property
    def compute(self) -> int:
        """Bytes of a number in products."""
        return 4 if self.precision == "fp32" else 2

    @property
    def table(self) -> int:
        """Parameters of the token table."""
        return self.gpt.padded_vocab_size * self.gpt.n_embd

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return 12 * self.gpt.n_embd**2 + 13 * self.gpt.n_embd


@dataclass(frozen=True)
class Held:
    """What a recipe holds whatever the batch, in bytes.

    device: all the time. gradients: on the device at the end of backward; at_once: from its first block on. casts: of weights,
    while a forward lasts. working: during the backward of a block. build: at most, while the engine is built. residual,
    norm_input: of a number in the residual stream, and of one that a LayerNorm keeps.
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


def need(step: Step, way: Way) -> Need:
    """Peak bytes of `step` done in `way`; KeyError for a recipe that is not in RECIPES.

    The peak is the highest of five moments: inside the loss, when backward begins, in the last block's backward, in the first
    block's, and when the table's two gradients are added. What a block keeps falls while gradients grow, so between the last and
    the first block it lies on a straight line.
    """
    held = RECIPES[way.recipe](step, MOMENT_BYTES[way.optimizer_state])
    gpt, t, table = step.gpt, step.tokens, 4 * step.table
    kept = kept_per_token(step, held, way.activation_checkpointing) * t
    all_kept = gpt.n_layer * kept + held.residual * gpt.n_embd * t  # the last norm keeps its input too
    at_work = held.working + working_per_token(step, held, way.activation_checkpointing) * t
    casts = held.casts if way.activation_checkpointing == "none" else 0.0  # else gone when autocast ends
    first_gradients = held.gradients * (1.0 if held.at_once else step.block / gpt.n_params_in_memory)
    device = max(
        held.build,
        held.device + held.casts + all_kept + loss_bytes(step, held),
        held.device + casts + all_kept + 2 * (table + held.norm_input * gpt.n_embd * t),
        held.device + casts + all_kept + at_work + table + first_gradients,
        held.device + held.gradients + kept + at_work,
        held.device + held.gradients + table + held.residual * gpt.n_embd * t,
    )
    return Need(device, held.host, held.disk)


def kept_per_token(step: Step, held: Held, mode: str) -> float:
    """Bytes that one block keeps for backward, per token.

    none: inputs of the two norms, of qkv, of the projection (attention's output), of fc, of GELU and of fc-out, q, k and v.
    full: the block's input. selective: that, and the outputs of its four products and of attention.
    """
    h, c, heads = step.gpt.n_embd, step.compute, step.gpt.n_head
    sums, statistics = 4 * heads, 2 * 2 * 4  # attention's log-sum-exp; mean and deviation of two norms
    if mode == "full":
        return held.residual * h
    if mode == "selective":
        return held.residual * h + c * h * (3 + 1 + 4 + 1) + c * _padded(step) + sums
    return 2 * held.norm_input * h + c * h * (1 + 1 + 4 + 4) + c * _attention(step) + sums + statistics


def working_per_token(step: Step, held: Held, mode: str) -> float:
    """Bytes per token beyond what is kept, in the backward of one block: what is computed again, and gradients under way."""
    h, c = step.gpt.n_embd, step.compute
    under_way = held.residual * h + (c * h if held.residual != c else 0) + 4 * c * h
    if mode == "none":
        return under_way
    again = kept_per_token(step, held, "none")
    if held.norm_input == held.residual:
        again -= held.residual * h  # the first norm's input is the block's, which is there
    if mode == "selective":
        padded = _padded(step)  # of padded heads q, k and v are made again
        again -= c * (4 * h + padded + (3 * h if padded == h else 0))
    return again + under_way


def loss_bytes(step: Step, held: Held) -> float:
    """Bytes inside the loss: the head's input and its gradient, the table's gradient, the logits of one block of rows."""
    gpt, c = step.gpt, step.compute
    cast = c if c != held.norm_input else 0
    table = (4 + cast) * step.table
    counted = 4 if step.device_type == "cpu" else c
    most = max(1, LOGITS_BYTES[step.device_type] // (counted * gpt.padded_vocab_size))
    blocks = max(1, -(-step.tokens // most))
    copies = LOGIT_COPIES[step.device_type][c]
    rows = (2 * held.norm_input + cast) * gpt.n_embd * step.tokens
    return rows + table + copies * (step.tokens / blocks) * gpt.padded_vocab_size


def _padded(step: Step) -> int:
    """Numbers in attention's output per token: on CUDA heads are padded to a multiple of 8."""
    d = step.gpt.head_dim
    return step.gpt.n_head * (-(-d // 8) * 8 if step.device_type == "cuda" else d)


def _attention(step: Step) -> int:
    """Numbers that attention and the projection behind it keep: q, k, v and output, the latter twice if heads were padded."""
    padded, h = _padded(step), step.gpt.n_embd
    return 4 * padded + (h if padded != h else 0)


def _pinned(step: Step, numels: Iterable[int], width: int) -> float:
    """Bytes of host tensors: on CUDA torch pins them, each rounded up to a power of two (CachingHostAllocator.h)."""
    sizes = [width * n for n in numels]
    return float(sum(1 << (size - 1).bit_length() for size in sizes) if step.device_type == "cuda" else sum(sizes))


def _single(step: Step, moments: float) -> Held:
    n, c = step.gpt.n_params_in_memory, step.compute
    lowered = c if c != 4 else 0
    return Held(
        device=(4 + moments) * n,
        gradients=4 * n,
        casts=lowered * step.block * step.gpt.n_layer,
        working=2 * lowered * step.block,  # casts of one block, and its gradients before they are fp32
    )


def _fsdp_offload(step: Step, moments: float) -> Held:
    """Root weights stay gathered; a block's fp32 shards come over, are cast and gathered; gradients are reduced in fp32."""
    gpt, c, h = step.gpt, step.compute, step.gpt.n_embd
    root, matrices = step.table + gpt.block_size * h + 2 * h, (3 * h * h, h * h, 4 * h * h, 4 * h * h, 13 * h)
    parameters = [*(matrices * gpt.n_layer), step.table, gpt.block_size * h, 2 * h]
    return Held(
        device=c * root + (GATHERED_BLOCKS * c + 4) * step.block,
        gradients=(c + 4) * root,
        working=(c + 2 * 4) * step.block,
        host=2 * _pinned(step, parameters, 4) + moments * gpt.n_params_in_memory,
        residual=c,
    )


def _zero_offload(step: Step, moments: float) -> Held:
    """Stage 2: weights on the device, in 16 bits also all gradients in fp32 until the step; the rest on the host, pinned."""
    n, c = step.gpt.n_params_in_memory, step.compute
    groups = (n - 13 * step.gpt.n_embd * step.gpt.n_layer, 13 * step.gpt.n_embd * step.gpt.n_layer)
    bucket = min(BUCKET, step.gpt.n_params // 8)
    return Held(
        device=c * n + c * bucket + 2 * c * step.table,
        gradients=4 * n if c != 4 else 0,
        at_once=True,
        working=c * step.block,
        build=(2 * c + 4) * n,  # the weights, their copy, and that in fp32 on its way to the host
        host=2 * _pinned(step, groups, 4) + _pinned(step, groups, c) + moments * n + c * step.table,
        residual=c,
        norm_input=c,
    )


def _zero_infinity(step: Step, moments: float) -> Held:
    """Stage 3: weights come from files; fp32 gradients pass through host memory, and a sub-group of state at a time."""
    n, c = step.gpt.n_params_in_memory, step.compute
    sub_group, bucket = min(n, SUB_GROUP + step.table), min(BUCKET, step.gpt.n_params // 8)
    return Held(
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
