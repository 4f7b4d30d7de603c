"""Bytes that a training step will need on the device, on the host and on disk, from the run's options alone.

`predict` takes the highest of a few moments of a step (`moments`). State is exact (state.py), what blocks keep and what is at
work is in activations.py, and what a recipe gathers, sends and holds besides in world_bytes.py. What an allocator rounds, splits
and keeps is not in it.

This module imports nothing heavy, so that planning stays fast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gptscale.foresight.memory.activations import kept_per_token, loss_bytes, working_per_token
from gptscale.foresight.memory.step import RecipeBytes, Step
from gptscale.foresight.memory.world_bytes import Layout, layout_of

if TYPE_CHECKING:
    from gptscale.common.recipe_config import RecipeConfig
    from gptscale.common.settings.run import Run

Moment = dict[str, float]
# torch's workspaces for cuBLAS: one for the thread of forward and one for that of backward, each of 4096 KiB twice and 16 KiB
# eight times, on Hopper of 32 MiB (aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize).
WORKSPACES, HOPPER_WORKSPACES, HOPPER = 2 * (2 * 4096 + 8 * 16) * 2**10, 2 * 32 * 2**20, 9


def predict(run: Run, config: RecipeConfig, capability: int = 0) -> dict[str, int]:
    """Return the bytes of one rank's device at its peak, by owner. On a CPU host and device are one memory.

    capability: the first number of a CUDA device's compute capability, 0 where it is not known.
    """
    step, fixed, layout = layout_of(run, config)
    mode = run.config.activation_checkpointing
    highest = max(moments_of_rank(step, fixed, mode, layout), key=lambda moment: sum(moment.values()))
    state = layout.state._asdict()
    held = {"parameter": state["parameters"], "optimizer state": state["optimizer"], "bucket": layout.buckets}
    host = fixed.host if step.device_type == "cpu" else 0.0
    held |= {"other": 16.0 * run.batch.sequences_per_rank * run.seq_len + layout.transfers + host}
    if step.device_type == "cuda":
        held["workspace"] = HOPPER_WORKSPACES if capability == HOPPER else WORKSPACES
    owners = dict.fromkeys((*held, *highest), 0.0)
    for part in (held, highest):
        for owner, nbytes in part.items():
            owners[owner] += nbytes
    if fixed.build > sum(owners.values()):
        owners["other"] += fixed.build - sum(owners.values())
    return {owner: round(nbytes) for owner, nbytes in owners.items() if nbytes}


def moments_of_rank(step: Step, fixed: RecipeBytes, mode: str, layout: Layout) -> list[Moment]:
    """Return the moments of a rank that may keep the activations of several micro-batches.

    If it has them all before its first backward, no gradients lie beside them then, and one micro-batch is gone when they do.
    """
    if layout.in_flight <= 1 or layout.in_flight < step.micro_batches:
        return moments(step, fixed, mode, layout)
    first = moments(replace(step, micro_batches=1), fixed, mode, layout)
    return first + moments(step, fixed, mode, replace(layout, in_flight=layout.in_flight - 1))


def moments(step: Step, fixed: RecipeBytes, mode: str, layout: Layout) -> list[Moment]:
    """Return what lives beside `fixed.device` at the moments that may be the peak, by owner.

    They are: inside the loss, when backward begins, in the last block's backward and at its end, in the one before it, in the
    first block's and at its end, and when the table's two gradients are added. Between the last and the first block it lies on a
    straight line, because what blocks keep falls while gradients grow.
    """
    gpt, t, table = step.gpt, step.tokens, 4 * step.table
    kept_by_block = kept_per_token(step, fixed, mode) * t
    between = step.ranks_of_sequence(fixed)
    stream = fixed.residual * gpt.n_embd * t / between
    all_kept = layout.in_flight * layout.n_blocks * kept_by_block + layout.kept_outside * stream
    # The last norm keeps its input, or a copy of another type, and its statistics.
    outside = (fixed.norm_input * gpt.n_embd + 8) * t / between if layout.has_head else 0.0
    all_kept += outside
    at_work = fixed.working + working_per_token(step, fixed, mode) * t
    # with checkpointing they are gone when autocast ends
    casts = fixed.casts if mode == "none" else 0.0
    head = float(fixed.head_gradient * step.table) if layout.has_head else 0.0
    # While most is at work, a block has the gradients of its last matrix only.
    block, matrix = (fixed.gradients * n / max(1, layout.n_params) for n in (step.block, step.last_matrix))
    if fixed.at_once or step.micro_batches > 1:
        held = 0.0
        if step.micro_batches > 1:
            held = fixed.gradients if fixed.held is None else fixed.held
        at_work_gradients, first_block, last_gradients = fixed.gradients + head, fixed.gradients + head, fixed.gradients
        second_block = at_work_gradients
    else:
        held = 0.0
        at_work_gradients, first_block, last_gradients = matrix + head, block + head, fixed.gradients - block + matrix
        second_block = block + at_work_gradients
    end = table + stream if layout.has_table else 0.0
    gathered = {"gathered shard": fixed.gathered}
    moments_in_loss: list[Moment] = []
    if layout.has_head:
        in_loss = loss_bytes(step, fixed)
        # Where the logits are all there, backward needs as many copies as the loss did.
        begins = in_loss if fixed.logits else 2 * (head + fixed.norm_input * gpt.n_embd * t)
        moments_in_loss += [
            {
                "gathered shard": fixed.gathered + fixed.last_gathered,
                "gradient": held,
                "activation": fixed.casts + all_kept,
                "logits and loss": in_loss,
            },
            {**gathered, "gradient": held, "activation": casts + all_kept, "under way in backward": begins},
        ]
    # The last norm is behind backward by then, and before the first block all casts are.
    before_last, before_first = (
        casts + all_kept - outside,
        (layout.in_flight - 1) * layout.n_blocks * kept_by_block + kept_by_block,
    )

    def moment(gradients: float, activations: float, under_way: float) -> Moment:
        return {**gathered, "gradient": gradients, "activation": activations, "under way in backward": under_way}

    return [
        *moments_in_loss,
        moment(at_work_gradients, before_last, at_work),
        moment(first_block, before_last - kept_by_block, stream + fixed.reduced),
        *(
            [moment(second_block, before_last - kept_by_block, at_work + fixed.lingering)]
            if layout.n_blocks > 1
            else []
        ),
        moment(first_block, before_last - 2 * kept_by_block, 2 * stream + fixed.block_end),
        moment(last_gradients, before_first, at_work + fixed.lingering * (layout.n_blocks > 1) + fixed.left_behind),
        moment(fixed.gradients, before_first - kept_by_block, stream + fixed.reduced + fixed.left_behind),
        moment(fixed.gradients, 0.0, end + fixed.reduced_at_end + fixed.left_behind),
        {"under way in the optimizer": fixed.stepping},
    ]
