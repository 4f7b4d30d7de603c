"""A bound for the bytes of one rank, from its run's options alone: what it holds, gathers and keeps for backward.

State is exact. Beside it stand what is gathered at once, what blocks keep, and logits. A simulation (foresight/simulate/) says
what a run needs, and this says which runs are worth one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from gptscale.common.engines.pipeline.stages import stages_per_rank
from gptscale.common.engines.rank_shapes import all_shapes, held_shapes, numel, stage_of
from gptscale.common.model.loss import LOGITS_BYTES
from gptscale.common.optim.blockwise import BLOCK
from gptscale.common.optim.compact_adamw import SMALL
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.optimizers import OPTIMIZERS
from gptscale.common.settings.run import Run
from gptscale.recipes import get

# DeepSpeed's stage 3 keeps up to so many parameters gathered.
LIVE_PARAMETERS = 1_000_000_000
# It keeps a weight in files, and lets it go after each use, if a rank's part has so many bytes (MIN_AIO_BYTES there).
SWAPPED_BYTES = 2**20
# A rank's flat vector begins at a multiple of this many elements in DeepSpeed.
ZERO_ALIGNMENT = 2
# Bytes alive for each logit in transformers' loss, which takes all rows at once; the second where tensor ranks cut the columns.
HF_LOGITS, HF_CUT_LOGITS = 12, 16


@dataclass(frozen=True)
class Places:
    """Bytes of one rank at its peak: those on the device by owner."""

    device: dict[str, int]
    host: int = 0
    disk: int = 0

    @property
    def on_device(self) -> int:
        return sum(self.device.values())


@dataclass(frozen=True)
class Held:
    """What a rank has of the model, in bytes.

    gradients: when backward ends. earlier: those that lie beside the activations, of earlier micro-batches or in buckets that
    stay. gathered: weights that are there beside its own. casts: those of weights, until the first backward. build: at least,
    while the engine is built. stream: bytes of a number between blocks; norm: of one that a LayerNorm keeps. logits: bytes alive
    for each, 0 where the loss goes block by block.
    """

    parameters: float
    gradients: float
    optimizer: float
    earlier: float = 0.0
    gathered: float = 0.0
    casts: float = 0.0
    build: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    stream: int = 4
    norm: int = 4
    logits: int = 0


def bound(run: Run, config: RecipeConfig) -> Places:
    """Return the bytes of the rank of `run`, whose host and device are one memory on a CPU."""
    held, t = HOLDERS[get(run.recipe).memory](run, config), run.batch.micro_batch_size * run.rank_seq_len
    _, ends, n_blocks = stage_of(run, config)
    mode, native = run.config.activation_checkpointing, get(run.recipe).engine != "colossalai"
    each = _kept_per_token(run, held, mode, native) * t
    # One block at a time is computed again.
    again = _kept_per_token(run, held, "none", native) * t - each
    flying, buffers = _in_flight(run, config) if run.pp_size > 1 else (1.0, 0.0)
    logits = _loss_bytes(run, held, t) if ends else 0.0
    kept = flying * n_blocks * each + buffers
    beside = {"gathered shard": held.gathered + held.casts, "gradient": held.earlier, "activation": kept}
    beside["logits and loss" if logits > again else "under way in backward"] = max(logits, again)
    if flying > 1 and flying >= run.batch.grad_accum_steps:
        # All are there before the first backward, so that no gradients lie beside them.
        beside["gradient"] = 0.0
    # Activations fall while gradients grow.
    after = {"gathered shard": held.gathered, "gradient": held.gradients, "under way in backward": again}
    after["activation"] = (flying - 1) * n_blocks * each + buffers
    owners = {"parameter": held.parameters, "optimizer state": held.optimizer}
    owners |= beside if sum(beside.values()) > sum(after.values()) else after
    owners["other"], host = max(0.0, held.build - sum(owners.values())), held.host
    if run.world.device.type == "cpu":
        owners["other"], host = owners["other"] + host, 0.0
    return Places({owner: round(n) for owner, n in owners.items() if n}, round(host), round(held.disk))


def _compute(run: Run) -> int:
    """Return the bytes of a number in products."""
    return 4 if run.config.precision == "fp32" else 2


def _loss_bytes(run: Run, held: Held, tokens: int) -> float:
    """Return the bytes inside the loss of the head's input, the gradients of both, and logits."""
    c, columns, h = _compute(run), run.gpt.padded_vocab_size // run.tp_size, run.gpt.n_embd
    if logits := held.logits or HF_LOGITS * run.config.is_own:
        return (logits * columns + c * h) * float(tokens)
    device = run.world.device.type
    # Tensor ranks, who know only their columns, take a copy in fp32, as a CPU does.
    logits = (c + 4 if c != 4 and (run.tp_size > 1 or device == "cpu") else c) * tokens * columns
    block = logits / max(1, math.ceil(logits / LOGITS_BYTES[device]))
    # The table is cast for the product.
    return block + (2 * held.norm * tokens + (4 + c) * columns) * h


def _kept_per_token(run: Run, held: Held, mode: str, cuts_sequence: bool) -> float:
    """Return the bytes that one block keeps for backward, per token.

    Korthikanti et al. 2022 (arXiv 2205.05198, section 4) count 34 h in 16 bits, here without masks of dropout. Kept are inputs of
    norms, matrices, attention and activation, with full the block's input, and with selective that and the outputs of products.
    """
    gpt, h, c, tp_size = run.gpt, run.gpt.n_embd, _compute(run), run.tp_size
    # On CUDA attention pads heads to a multiple of 8 numbers, and its output is then copied.
    padding = gpt.n_head * (-gpt.head_dim % 8) if run.world.device.type == "cuda" else 0
    between, width = tp_size if cuts_sequence else 1, gpt.attention_width
    if mode == "full":
        return held.stream * h / between
    out = sum(weight.shape[0] for weight in gpt.weights().block if weight.is_matrix and weight.cut == "rows")
    # Tensor ranks gather the sequence, so that two inputs are whole, as is a projection's output.
    if mode == "selective":
        return held.stream * h / between + (c * (out + width + padding) + 4 * gpt.n_head) / tp_size + 2 * c * h
    out += sum(weight.shape[1] for weight in gpt.weights().block if weight.cut == "columns") + gpt.kept_beside
    out += 4 * padding + width * bool(padding)
    return 2 * held.norm * h / between + (c * out + 4 * gpt.n_head + 16) / tp_size + 2 * c * h


def _in_flight(run: Run, config: Any) -> tuple[float, float]:
    """Return the micro-batches whose activations a stage keeps at once, and the bytes of its buffers for other stages."""
    p, i, m = run.pp_size, run.mesh.place("pp", run.world.rank), run.batch.grad_accum_steps
    per_rank = stages_per_rank(config) if hasattr(config, "stages_per_rank") else config.chunks
    if config.schedule in ("GPipe", "LoopedBFS"):
        flying = float(m)
    elif per_rank == 1:
        flying = float(min(p - i, m))
    else:
        flying = min(float(m), p + (p - 1 - 2 * i) / 2 if i < p / 2 else p / 2 + 1)
    # Each boundary has one for every micro-batch, of what comes in and of the gradient that comes back.
    boundaries = 2 * per_rank - (i == 0) - (i == p - 1)
    return flying, boundaries * m * 4.0 * run.batch.micro_batch_size * run.rank_seq_len * run.gpt.n_embd / run.tp_size


def moments(run: Run, config: RecipeConfig, numels: Iterable[int]) -> int:
    """Return the bytes of the optimizer's state of tensors of so many elements, in the model's order, as common/optim has it."""
    sizes, form, row = list(numels), run.config.optimizer_state, OPTIMIZERS[run.config.optimizer]
    keys = [row.state_keys] * len(sizes)
    if row.matrix_keys:
        before, blocks, _ = held_shapes(run, config)
        own = [row.matrix_keys if len(shape) > 1 else row.state_keys for part in blocks for shape in part.values()]
        keys[len(before) : len(before) + len(own)] = own
    if form == "fp32":
        # Each has a count of steps.
        return sum(4 * len(kept) * n + 4 for kept, n in zip(keys, sizes, strict=True) if kept)
    packed = [n - n % BLOCK if n >= SMALL else 0 for n in sizes]
    each = {"bf16": 2 * BLOCK, "8bit": BLOCK + 4}[form]
    return 4 + sum(2 * each * (p // BLOCK) + 8 * (n - p) for n, p in zip(sizes, packed, strict=True))


def _whole(run: Run, config: RecipeConfig) -> Held:
    """Return what a rank holds that has all of what tensor ranks and stages leave it."""
    numels, c, row = [math.prod(shape) for shape in all_shapes(run, config)], _compute(run), get(run.recipe)
    n, in_c = sum(numels), row.casts_weights and run.split_size > 1
    # DDP's gradients live in buckets from step to step, those of micro-batches that are not averaged beside them.
    stays, sums = 4 * n * (row.axes == ("dp",)), 4 * n * (run.batch.grad_accum_steps > 1)
    # Autocast keeps its casts of the blocks' weights until forward ends.
    cast = 0 if c == 4 or in_c else c * (n - _root(run, config))
    # One autocast lasts for all micro-batches of stages, whose gradients wait in the casts' type.
    gradients, width = max(4 * n, stays + sums) + (cast if run.pp_size > 1 else 0), c if in_c else 4
    return Held(4 * n, gradients, moments(run, config, numels), stays + sums, casts=cast, stream=width, norm=width)


def _root(run: Run, config: RecipeConfig) -> int:
    """Return the parameters outside blocks."""
    return numel(shape for part in held_shapes(run, config)[::2] for shape in part.values())


def _rows(run: Run, config: RecipeConfig) -> Held:
    """Return what a rank holds of parameters that are cut by rows over data ranks, with blocks gathered as they are used."""
    c, root = _compute(run), _root(run, config)
    shards = run.split_size // getattr(config, "dp_replicate_size", 1)
    shard, padded, own, n_blocks = run.split_place % shards, 0, [], stage_of(run, config)[2]
    for shape in all_shapes(run, config):
        # Equal shards are sent, of rows that may be padding.
        rows, row = -(-shape[0] // shards), math.prod(shape[1:])
        padded += rows * row
        own.append(max(0, min(rows, shape[0] - shard * rows)) * row)
    n, state = numel(all_shapes(run, config)), moments(run, config, own)
    # The last stage may hold the head alone.
    block = (n - root) // max(1, n_blocks)
    at_once = min(2, n_blocks) if getattr(config, "reshard_after_forward", True) else n_blocks
    # beside blocks that are gathered, one whose gradients are reduced in fp32
    gathered = c * (root + at_once * block) + 4.0 * block
    gradients, earlier = 4.0 * padded, 4.0 * (padded + root) if run.batch.grad_accum_steps > 1 else 0.0
    engine, on_cuda = get(run.recipe).engine, run.world.device.type == "cuda"
    if engine == "fairscale" and earlier:
        # It keeps the gradients of micro-batches that are not sent yet whole.
        earlier = float(c * n)
    if run.pp_size > 1:
        # Until the last micro-batch a stage sums its gradients before it sends any, and what it has gathered stays.
        gradients, gathered = 4.0 * n, c * n + 4.0 * block
        earlier = gradients
    # They get the whole model on the device and cut it there: Accelerate into shards beside it, fairscale in its place.
    whole = {"accelerate": 4 * (n + padded), "fairscale": 4 * n}.get(engine, 0) if on_cuda else 0
    # autocast computes norms in fp32 on CUDA
    held = Held(4 * padded, gradients, state, earlier, gathered, build=whole, stream=c, norm=4 if on_cuda else c)
    if config.offload == "none":
        return held
    # Gradients leave as they are reduced.
    return replace(held, parameters=0, gradients=c * root, optimizer=0, earlier=0.0, host=8.0 * padded + state)


def _flat(run: Run, config: Any) -> Held:
    """Return what a rank holds under DeepSpeed: flat vectors cut evenly, and below stage 3 weights whole."""
    c, dp_size, shapes = _compute(run), run.split_size, all_shapes(run, config)
    n, unit = numel(shapes), ZERO_ALIGNMENT * dp_size
    if config.stage == 3:
        return _flat_all(run, config, -(-n // dp_size), n)
    groups = [numel(s for s in shapes if (len(s) > 1) == matrices) for matrices in (True, False)]
    flat = [-(-n // unit) * unit for n in groups]
    own = [n // dp_size for n in flat]
    optimizer = 4 * sum(own) + moments(run, config, own)
    gradients = earlier = 4.0 * sum(own)
    if config.stage == 1 and c != 4:
        # It sums all gradients in fp32, in a vector that stays.
        gradients, earlier = (4.0 + c) * n, 4.0 * n
    held = Held(c * sum(flat), gradients, optimizer, earlier, stream=c, norm=c)
    if config.offload == "none":
        return replace(held, earlier=gradients if run.batch.grad_accum_steps > 1 else earlier * (config.stage == 1))
    return replace(held, optimizer=0, gradients=0.0, earlier=0.0, host=optimizer + (4 + c) * sum(own))


def _flat_all(run: Run, config: Any, own: int, n: int) -> Held:
    """Return what a rank holds under DeepSpeed's stage 3, whose fp32 gradients stay, as do weights that are used again soon."""
    c = _compute(run)
    live = c * float(min(n, LIVE_PARAMETERS)) if run.split_size > 1 or config.offload != "none" else 0.0
    optimizer = 4 * (1 + len(OPTIMIZERS[run.config.optimizer].state_keys)) * own
    held = Held(c * own, 4 * own, optimizer, 4 * own, live, stream=c, norm=c)
    if config.offload == "cpu":
        return replace(held, parameters=0, optimizer=0, host=(c + 4.0) * own + optimizer)
    if config.offload == "nvme":
        if c * max(run.gpt.block_matrices) // run.split_size >= SWAPPED_BYTES:
            live = c * ((root := _root(run, config)) + 1.5 * (n - root) / run.gpt.n_layer)
        held = replace(held, gathered=live, gradients=0, earlier=0)
        return replace(held, parameters=0, optimizer=0, host=4.0 * own + 20 * min(own, 10**9), disk=(16 + c) * own)
    return held


def _owners(run: Run, config: RecipeConfig) -> Held:
    """Return what a rank holds under fairscale's OSS: weights whole, the state of a parameter with its owner."""
    whole = _whole(run, config)
    owned: list[list[int]] = [[] for _ in range(run.split_size)]
    # Each goes to the rank that has least so far, matrices first.
    for shape in sorted(all_shapes(run, config), key=lambda shape: len(shape) == 1):
        min(owned, key=sum).append(math.prod(shape))
    # Those of micro-batches that are not sent yet are all there.
    earlier = whole.parameters if run.batch.grad_accum_steps > 1 else 4.0 * sum(owned[run.split_place])
    return replace(whole, optimizer=moments(run, config, owned[run.split_place]), gradients=earlier, earlier=earlier)


def _plugin(run: Run, config: RecipeConfig) -> Held:
    """Return what a rank holds under Colossal-AI's plugin of tensor ranks and stages, which has fp32 weights besides."""
    whole, c, logits = _whole(run, config), _compute(run), HF_LOGITS if run.tp_size == 1 else HF_CUT_LOGITS
    n, sums = whole.parameters / 4, run.batch.grad_accum_steps > 1
    optimizer = whole.optimizer + (4 * n if c != 4 else 0)
    # Without stages gradients live in DDP's buckets, those of micro-batches that are not averaged beside them.
    earlier = c * n * (sums + (run.pp_size == 1))
    # The optimizer makes fp32 gradients of all.
    return Held(c * n, 4 * n + c * n * (run.pp_size == 1), optimizer, earlier, stream=c, norm=c, logits=logits)


def _chunks(run: Run, config: Any) -> Held:
    """Return what a rank holds under Colossal-AI's LowLevelZero, and Gemini, which cuts weights and gradients too."""
    c, n = _compute(run), numel(all_shapes(run, config))
    own, gemini = -(-n // run.split_size), hasattr(config, "shard_param_frac")
    cut = config.shard_param_frac if gemini else 0.0
    on_device = 1.0 - getattr(config, "offload_optim_frac", 0.0)
    gradients = c * own if gemini or config.stage == 2 else c * n
    earlier = gradients if gemini or run.batch.grad_accum_steps > 1 else 0.0
    weights, state = c * (n * (1 - cut) + own * cut), 12 * own
    gathered, host = c * run.gpt.padded_vocab_size * run.gpt.n_embd * cut, state * (1 - on_device)
    return Held(weights, gradients, state * on_device, earlier, gathered, host=host, stream=c, norm=c, logits=HF_LOGITS)


# By the names of recipes/__init__.py, `memory`.
HOLDERS: dict[str, Callable[[Run, Any], Held]] = dict.fromkeys(("replicas", "matrices", "stages"), _whole) | {
    "rows": _rows, "flat": _flat, "owners": _owners, "plugin": _plugin, "chunks": _chunks,
    "mesh": lambda run, c: (_rows if run.split_size > 1 and c.data_parallel == "fsdp" else _whole)(run, c),
    "strategy": lambda run, c: (_rows if c.strategy == "fully_shard" else _whole)(run, c),
}  # fmt: skip
