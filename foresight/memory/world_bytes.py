"""What one rank of each recipe holds, gathers and sends beside its activations.

A recipe's row in the table says which of these layouts is its own (`recipes/__init__.py`, `memory`). This module imports
nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gptscale.common.engines.pipeline.plan import stages_per_rank
from gptscale.common.engines.rank_shapes import all_shapes, numel, place_of, stage_of
from gptscale.foresight.memory.layout import NO_STATE, Answer, Case, Layout
from gptscale.foresight.memory.state import (
    State,
    cut_by_owners,
    cut_by_rows,
    cut_flat,
    kept_gradients,
    n_moments,
    owned,
    whole,
)
from gptscale.foresight.memory.step import RecipeBytes, Step
from gptscale.recipes import get

if TYPE_CHECKING:
    from gptscale.common.recipe_config import RecipeConfig
    from gptscale.common.settings.run import Run


# Elements of DeepSpeed's reduce bucket, and buffers of the largest weight (recipes/zero.py).
BUCKET, WEIGHT_BUFFERS = 50_000_000, 8
# transformers' head computes the logits of all rows. Then there are these in fp32, their logarithms of the softmax, and those of
# the columns that are no padding (common/engines/colossal/gpt2.py, cross_entropy).
HF_LOGITS = 12
# Bytes for each of a rank's columns of a split table: in fp32, with padding masked, their exponentials, and the gradient.
HF_CUT_LOGITS = 16

# DeepSpeed keeps a weight in files only if a rank's part has this many bytes (runtime/swap_tensor/utils.py, MIN_AIO_BYTES), and
# frees it after each use (recipes/zero.py). What is smaller is gathered ahead, as at stage 3.
SWAPPED_BYTES = 2**20


def layout_of(run: Run, config: RecipeConfig) -> tuple[Step, RecipeBytes, Layout]:
    """Return the step of one micro-batch, and what the recipe holds beside it on the rank of `run`."""
    device_type = run.world.device.type
    tokens = run.batch.micro_batch_size * run.seq_len
    step = Step(
        run.gpt, tokens, run.config.precision, device_type, run.tp_size, run.batch.grad_accum_steps, run.seq_len
    )
    row = get(run.recipe)
    case = Case(run, config, step, place_of(run), row.casts_weights)
    return step, *LAYOUTS[row.memory](case)


def _replicas(case: Case) -> Answer:
    """Return the layout of whole replicas. Under DDP gradients live in buckets, with one rank too."""
    state = whole(case.run, case.config)
    largest = 4 * max(n for n in (case.step.table, 4 * case.run.gpt.n_embd**2))
    fixed = case.lowered()
    if not get(case.run.recipe).axes:
        return replace(fixed, gradients=state.gradients), case.layout(state)
    # A gradient lies beside its bucket until it is copied. Those of micro-batches that are not averaged never enter one.
    if case.step.micro_batches > 1:
        fixed = replace(fixed, gradients=state.gradients)
    fixed = replace(fixed, working=fixed.working + 16 * case.run.gpt.n_embd**2, reduced_at_end=largest)
    return fixed, case.layout(state, buckets=float(state.gradients))


def _strategy(case: Case) -> Answer:
    """Return one of two layouts by name. Its buckets are not its gradients."""
    if case.config.strategy == "fully_shard":
        return _rows(case)
    fixed, layout = _replicas(case)
    return replace(fixed, gradients=layout.buckets), layout


def _rows(case: Case) -> Answer:
    """Return the layout of parameters cut by rows over data ranks, with blocks gathered as they are used."""
    place, config, c = case.place, case.config, case.compute
    shards = place.dp_size // getattr(config, "dp_replicate_size", 1)
    state = cut_by_rows(case.run, config, shards, place.dp_rank % shards)
    block, root, copies = case.step.block, case.root, 2 if case.sends_copy else 1
    keeps = not getattr(config, "reshard_after_forward", True)
    n_blocks = stage_of(case.run, config)[1]
    ahead = min(1 + getattr(config, "prefetch", 1), n_blocks)
    fixed = RecipeBytes(
        0,
        gradients=state.gradients + c * root,
        working=c * (ahead * block + case.step.last_matrix + case.step.tokens * case.run.gpt.n_embd),
        gathered=c * root + (c * n_blocks * block if keeps else 0),
        reduced=c * block * (1 + max(0, ahead - 1)) + 4 * copies * block,
        held=state.gradients + 4.0 * root,
        # A block's sum is let go when the next one's backward ends (_fsdp_param_group.py, reduce_scatter_state).
        lingering=4.0 * block,
        # weights, gradients, and the last one of these twice
        block_end=c * ((ahead + 1) * block + 3 * case.run.gpt.n_embd**2) + 4.0 * block,
        # Gathered weights are let go when the next are gathered (all_gather_state, there).
        last_gathered=c * block,
        reduced_at_end=4 * copies * root + 4 * root / shards,
        head_gradient=c,
        residual=c,
        # autocast computes norms in fp32 on CUDA, so that they keep a copy of their input
        norm_input=4 if c == 4 or case.step.device_type == "cuda" else c,
    )
    engine = get(case.run.recipe).engine
    if case.step.device_type == "cuda" and engine in ("accelerate", "fairscale"):
        # They get the whole model on the device and cut it there: Accelerate into shards beside it, fairscale in its place.
        whole_model = 4.0 * numel(all_shapes(case.run, case.config))
        fixed = replace(fixed, build=whole_model + (state.parameters if engine == "accelerate" else 0))
    if engine == "fairscale":
        # It keeps the gradients of micro-batches that are not sent yet whole.
        fixed = replace(fixed, held=float(c * numel(all_shapes(case.run, case.config))))
    if case.sends_copy:
        # gloo's threads let go of buffers when they may: what waits was measured, and is in `reduced`.
        fixed = replace(fixed, held=None, lingering=0.0, block_end=0.0, last_gathered=0.0, head_gradient=4)
    if case.on_host:
        # A gradient's shard leaves as soon as it is reduced.
        host = float(state.parameters + state.optimizer)
        return replace(fixed, gradients=float(c * root)), case.layout(NO_STATE, host=host)
    return fixed, case.layout(state)


def _flat(case: Case) -> Answer:
    """Return the layout of DeepSpeed's stages 1 and 2, with weights whole and the rest as flat vectors cut evenly.

    Stage 3 is `_flat_all`.
    """
    place, run, c = case.place, case.run, case.compute
    if case.config.stage == 3:
        return _flat_all(case)
    state = cut_flat(run, case.config, place.dp_size, c)
    bucket = min(BUCKET, run.gpt.n_params // 8)
    n = numel(all_shapes(run, case.config))
    keeps_all = case.config.stage == 1 and run.batch.grad_accum_steps > 1
    # In 16 bits stage 1 sums all gradients in fp32, in a vector that stays.
    sums = 4.0 * n if case.config.stage == 1 and c != 4 else 0.0
    offloads = case.config.offload != "none"
    transfers = c * bucket + (2 * c * case.step.table if offloads else 0.0)
    fixed = RecipeBytes(
        0,
        gradients=c * n if sums else 4 * n if keeps_all else state.gradients,
        working=c * case.step.block / 2,
        reduced=c * bucket,
        reduced_at_end=c * max(bucket, case.step.table),
        # gloo receives all new weights into a copy, when buckets are gone
        stepping=c * n - transfers if case.sends_copy else 0.0,
        host=(4 + c) * n / place.dp_size if offloads else 0.0,
        residual=c,
        norm_input=c,
    )
    host = 0.0
    if case.on_host:
        # The other buffer of the largest weight's gradient is on the host, as is the state.
        host, transfers = float(state.optimizer), transfers - c * case.step.table
        fixed, state = replace(fixed, gradients=0.0), State(state.parameters, 0, 0)
    elif offloads:
        state = state._replace(optimizer=state.optimizer - (8 if n_moments(run) else 0))
    return fixed, case.layout(state, buckets=sums, transfers=transfers, host=host)


def _flat_all(case: Case) -> Answer:
    """Return the layout of DeepSpeed's stage 3, which cuts every parameter evenly.

    Weights that will soon be used again stay gathered.
    """
    place, run, c = case.place, case.run, case.compute
    n = numel(all_shapes(run, case.config))
    own = -(-n // place.dp_size)
    bucket = min(BUCKET, run.gpt.n_params // 8)
    on_disk = case.config.offload == "nvme"
    state = State(c * own, 4 * own, 0 if on_disk else 4 * (1 + n_moments(run)) * own)
    longest = max(2**20, run.gpt.largest_weight // place.dp_size + 1)
    fixed = RecipeBytes(
        0,
        gradients=4 * own,
        at_once=True,
        gathered=c * min(n, 1_000_000_000),
        working=c * case.step.block,
        # buffers of the largest weight, which DeepSpeed copies to memory of its own
        build=WEIGHT_BUFFERS * c * longest if on_disk else 0.0,
        residual=c,
        norm_input=c,
        head_gradient=c,
    )
    if case.on_host:
        if on_disk and c * case.step.last_matrix // place.dp_size >= SWAPPED_BYTES:
            fixed = replace(fixed, gathered=c * (case.root + 1.5 * case.step.block))
        # Without files the sums of gradients stay on the device.
        transfers = 4.0 * (bucket + (0 if on_disk else own))
        host = float(state.parameters + state.optimizer)
        return replace(fixed, gradients=0.0, build=0.0), case.layout(NO_STATE, transfers=transfers, host=host)
    if case.step.device_type == "cuda":
        # The vector of fp32 gradients stays (stage3.py, grad_partitions_flat_buffer), and nothing copies a bucket, as gloo does.
        fixed = replace(fixed, gradients=0.0, gathered=fixed.gathered * (place.dp_size > 1))
        return fixed, case.layout(state, buckets=4.0 * own, transfers=4.0 * bucket)
    return fixed, case.layout(state, transfers=float(2 * 4 * bucket + (2 * 4 * own if on_disk else 0)))


def _owners(case: Case) -> Answer:
    """Return the layout of fairscale's OSS: weights and gradients whole.

    The state of a parameter lies with its owner.
    """
    place = case.place
    state = cut_by_owners(case.run, case.config, place.dp_rank, place.dp_size)
    n, room = state.parameters, case.config.reduce_buffer_size
    # Before the first step it makes a bucket for each rank as large as may be, and shrinks them one after another.
    buckets = place.dp_size * min(4 * room, n) + n // place.dp_size
    n_kept = kept_gradients(owned(case.run, case.config, place.dp_size), place.dp_rank, room)
    fixed = replace(case.lowered(), reduced_at_end=4.0 * case.step.table)
    # Gradients that are not sent yet are all there.
    held = n - 4.0 * n_kept if case.step.micro_batches > 1 else 0.0
    fixed = replace(fixed, build=float(n + state.optimizer + buckets), gradients=held)
    return fixed, case.layout(state, buckets=4.0 * n_kept)


def _matrices(case: Case) -> Answer:
    """Return the layout of matrices cut over tensor ranks.

    If there are data ranks too, what remains is cut by rows over them.
    """
    state = whole(case.run, case.config)
    return replace(case.lowered(), gradients=state.gradients), case.layout(state)


def _stages(case: Case) -> Answer:
    """Return the layout of stages, with several micro-batches in flight."""
    fixed, layout = _matrices(case)
    # One autocast lasts for all micro-batches. So a weight's cast is that of the first, older than all that the others do, and
    # backward turns its gradient to fp32 when all of that is done.
    waiting = fixed.working / 2 * (layout.n_blocks - 1)
    return replace(fixed, left_behind=waiting), replace(layout, **_in_flight(case, layout))


def _in_flight(case: Case, layout: Layout) -> dict[str, Any]:
    place, m, schedule = case.place, case.run.batch.grad_accum_steps, case.config.schedule
    per_rank = stages_per_rank(case.config) if hasattr(case.config, "stages_per_rank") else case.config.chunks
    p, i = place.pp_size, place.pp_rank
    if schedule in ("GPipe", "LoopedBFS"):
        flying = float(m)
    elif per_rank == 1:
        flying = float(min(p - i, m))
    else:
        flying = min(float(m), p + (p - 1 - 2 * i) / 2 if i < p / 2 else p / 2 + 1)
    # Each boundary has a buffer for every micro-batch, of what comes in and of the gradient that comes back.
    boundaries = 2 * per_rank - (i == 0) - (i == p - 1 and layout.has_head)
    stream = case.step.tokens * case.run.gpt.n_embd * 4 / case.step.tp_size
    return {"in_flight": flying, "transfers": float(boundaries * m * stream), "kept_outside": flying * (i < p - 1)}


def _mesh(case: Case) -> Answer:
    """Return the layout of data, tensor and pipeline ranks on one mesh."""
    staged = case.place.pp_size > 1
    if case.place.dp_size == 1:
        # Only fully_shard casts weights.
        fixed, layout = (_stages if staged else _matrices)(replace(case, casts_weights=False))
    elif case.config.data_parallel == "fsdp":
        fixed, layout = _rows(case)
        if staged:
            # Until the last micro-batch a stage sums its gradients in fp32 before it sends any, and a block that backward has
            # gathered stays so (torch/distributed/pipelining/stage.py, set_reshard_after_backward).
            n = float(layout.n_params)
            weights = case.compute * (n - case.root)
            fixed = replace(fixed, gradients=4 * n, held=None, left_behind=weights, lingering=0.0, block_end=0.0)
    else:
        fixed, layout = _matrices(case)
    return (fixed, replace(layout, **_in_flight(case, layout))) if staged else (fixed, layout)


def _plugin(case: Case) -> Answer:
    """Return the layout of Colossal-AI's plugin: tensor ranks, stages, and replicas that average gradients.

    In 16 bits there are fp32 weights besides.
    """
    state = whole(case.run, case.config)
    c = case.compute
    if c != 4:
        n = numel(all_shapes(case.run, case.config))
        state = State(c * n, c * n, state.optimizer + 4 * n)
    gradients, staged = float(state.gradients), case.place.pp_size > 1
    # Without stages gradients live in DDP's buckets from step to step, with one data rank too. Those of micro-batches that are
    # not averaged never enter one.
    layout = case.layout(state, buckets=_masks(case) + (0.0 if staged else gradients))
    fixed = replace(
        case.lowered(),
        gradients=gradients if staged or case.step.micro_batches > 1 else 0.0,
        # The optimizer makes fp32 gradients of all, and then steps.
        stepping=2 * gradients if c != 4 else 0.0,
        head_gradient=c,
        logits=HF_LOGITS if case.step.tp_size == 1 else HF_CUT_LOGITS,
        cuts_sequence=False,
    )
    return (fixed, replace(layout, **_in_flight(case, layout))) if staged else (fixed, layout)


def _chunks(case: Case) -> Answer:
    """Return the layout of Colossal-AI's LowLevelZero and Gemini: fp32 weights and moments cut evenly.

    Gemini cuts its weights and gradients too.
    """
    place, run, c, config = case.place, case.run, case.compute, case.config
    n = numel(all_shapes(run, config))
    own = -(-n // place.dp_size)
    gemini = hasattr(config, "shard_param_frac")
    cut = config.shard_param_frac if gemini else 0.0
    weights = c * (n * (1 - cut) + own * cut)
    gradients = c * own if gemini or config.stage == 2 else c * n
    on_device = 1.0 - getattr(config, "offload_optim_frac", 0.0)
    state = State(round(weights), round(gradients), round(12 * own * on_device))
    # Gemini's chunks of gradients stay, because micro-batches may be added to them. Of weights it gathers those at work.
    stays = gradients if gemini else 0.0
    fixed = RecipeBytes(
        0,
        gradients=gradients - stays,
        gathered=c * case.step.table * cut * (place.dp_size > 1),
        working=c * case.step.block,
        reduced=(c if gemini else 4.0) * case.step.block,
        host=12 * own * (1 - on_device),
        residual=c,
        norm_input=c,
        head_gradient=c,
        logits=HF_LOGITS,
    )
    return fixed, case.layout(state, buckets=_masks(case) + stays)


def _masks(case: Case) -> float:
    """Return the bytes of the causal masks that transformers' blocks keep as buffers, one of bool each, and never read here."""
    return float(stage_of(case.run, case.config)[1] * case.run.gpt.block_size**2)


LAYOUTS: dict[str, Callable[[Case], Answer]] = {
    "replicas": _replicas,
    "strategy": _strategy,
    "rows": _rows,
    "flat": _flat,
    "owners": _owners,
    "matrices": _matrices,
    "stages": _stages,
    "mesh": _mesh,
    "plugin": _plugin,
    "chunks": _chunks,
}
