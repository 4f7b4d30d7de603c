"""The step of a recipe on this machine's processors, as work on streams.

On a CPU a layer's transfers hold up its computation: torch's FSDP, DTensor and the libraries wait for gloo within a layer. So
the layer as the recipe holds it is one operation, timed whole (layers.py), hooks and copies included. What runs beside a layer
has items of its own: the buckets of DDP, and the stages of a pipeline with what they send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from gptscale.common.engines.pipeline.plan import PipelineOptions, stage_sizes, stages_per_rank
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.shape import ModelConfig as GPTConfig
from gptscale.foresight.time.data_sheets import GLOO, HERE
from gptscale.foresight.time.operations import BlockShape, HeadShape, MessageShape, StateShape
from gptscale.foresight.time.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, needs, order_of_schedule
from gptscale.foresight.time.work import COMPUTE, Operation, StepWork, Work, added, times
from gptscale.recipes import get

# Blocks and optimizer of these are the model's own.
PLAIN = ("single", "pipeline")
# Bytes of a number that stages send each other.
WIDTH = 4


def block_parameters(gpt: GPTConfig) -> int:
    """Return the parameters of a block, biases and norms included."""
    return 12 * gpt.n_embd**2 + 13 * gpt.n_embd


def rest_parameters(gpt: GPTConfig) -> int:
    """Return the parameters of the tables and the last norm."""
    return (gpt.padded_vocab_size + gpt.block_size + 2) * gpt.n_embd


class LayersHere:
    """The operations of a recipe's layers at one micro-batch."""

    def __init__(self, recipe: str, gpt: GPTConfig, seq_len: int, micro_batch: int, ranks: int, tp: int = 1) -> None:
        self.gpt, self.ranks = gpt, ranks
        self.prefix = "" if recipe in PLAIN else f"{recipe}: "
        tokens, h = micro_batch * seq_len, gpt.n_embd
        self.tokens = tokens
        self.block = BlockShape(tokens, h, 4 * h, 0, gpt.n_head, gpt.n_head, seq_len, tp, 1, int(tp > 1))
        self.head = HeadShape(tokens, h, gpt.padded_vocab_size, tp)

    def part(self, kind: str) -> Operation:
        """Return `block forward`, `head backward`, `block optimizer` and so on, as an operation of this machine."""
        what, phase = kind.split()
        shape: tuple[int, ...] = self.block if what == "block" else self.head
        if phase == "optimizer":
            shape = StateShape((block_parameters if what == "block" else rest_parameters)(self.gpt))
        return Operation(self.prefix + kind, tuple(shape), HERE)

    def backward(self, checkpointing: str, is_last: bool = True) -> dict[Operation, float]:
        """Return the backward of a block, with what it computes again. is_last: its gradients are exchanged."""
        again = {
            "none": {},
            "full": {self.part("block forward"): 1.0},
            "selective": {Operation("block elementwise", tuple(self.block), HERE): 1.0},
        }
        return added({self.part(f"block {self.backward_phase(is_last)}"): 1.0}, again[checkpointing])

    def backward_phase(self, is_last: bool) -> str:
        """Return the name of a backward. Those of plain models are all alike."""
        return "backward" if is_last or not self.prefix else "accumulation"

    def optimizer(self, blocks: int, rest: int) -> dict[Operation, float]:
        """Return the step of so many blocks, with `rest` parameters beside them."""
        if self.prefix:
            return {self.part("block optimizer"): float(blocks), self.part("head optimizer"): 1.0}
        return {Operation("optimizer", StateShape(blocks * block_parameters(self.gpt) + rest), HERE): 1.0}

    def message(self, kind: str, n_bytes: int) -> dict[Operation, float]:
        """Return a collective of all ranks."""
        return {Operation(kind, MessageShape(n_bytes, self.ranks, self.ranks, 1), GLOO): 1.0}


def is_written(run: Run, recipe_config: RecipeConfig) -> bool:
    """Return whether `step_here` knows the step of a run: layers are timed on a CPU as a recipe holds them by its defaults."""
    row = get(run.recipe)
    if run.recipe == "pipeline":
        return run.batch.dp_size == 1
    by_default = recipe_config == type(recipe_config)(**row.preset)
    return run.pp_size == 1 and by_default and not row.environment and not row.needs_cuda


def step_here(run: Run, recipe_config: RecipeConfig) -> StepWork:
    """Return the step of a run on the processors of this machine."""
    if run.recipe == "pipeline":
        return _pipeline(run, cast(PipelineOptions, recipe_config))
    layers = LayersHere(run.recipe, run.gpt, run.seq_len, run.batch.micro_batch_size, run.world.world_size, run.tp_size)
    step = StepWork()
    step.add("host", 0, COMPUTE, {Operation("host", (), HERE): 1.0})
    n_layer, n = run.gpt.n_layer, run.batch.grad_accum_steps
    for m in range(n):
        is_last = m == n - 1
        forward = layers.part("block forward")
        backward = layers.backward(run.config.activation_checkpointing, is_last)
        step.add(f"forward {m}", 0, COMPUTE, {forward: float(n_layer)})
        step.add(f"head {m}", 0, COMPUTE, {layers.part("head forward"): 1.0})
        head = layers.part(f"head {layers.backward_phase(is_last)}")
        step.add(f"backward {m}", 0, COMPUTE, added(times(n_layer, backward), {head: 1.0}))
    step.add("optimizer", 0, COMPUTE, layers.optimizer(n_layer, rest_parameters(run.gpt)))
    return step


def _pipeline(run: Run, options: PipelineOptions) -> StepWork:
    sizes, per_rank, m = stage_sizes(run, options), stages_per_rank(options), run.batch.grad_accum_steps
    layers = LayersHere("pipeline", run.gpt, run.seq_len, run.batch.micro_batch_size, run.world.world_size)
    order, step = order_of_schedule(options.schedule, run.pp_size, per_rank, m), StepWork()
    sent = WIDTH * layers.tokens * run.gpt.n_embd
    message = {Operation("send", MessageShape(sent, 2, 2, 1), GLOO): 1.0}
    places: dict[tuple[str, int, int], int] = {}
    pending: list[tuple[int, tuple[str, int, int]]] = []
    for rank, computations in order.items():
        step.add("host", rank, COMPUTE, {Operation("host", (), HERE): 1.0})
        for kind, stage, i in computations:
            # A stage waits for what it receives, and hands on what it sends without waiting.
            work = _stage_work(layers, sizes, stage, kind, run.config.activation_checkpointing)
            if waits := needs(kind, stage, i, len(sizes)):
                pending.append((step.add(f"receive {kind}{i}", rank, COMPUTE, message), waits[0]))
            places[BACKWARD if kind == INPUT else kind, stage, i] = step.add(
                f"{kind}{i} of stage {stage}", rank, COMPUTE, work
            )
    for place, computation in pending:
        item = step.items[place]
        step.items[place] = item._replace(needs=(*item.needs, places[computation]))
    tied = layers.message("all-reduce", WIDTH * run.gpt.padded_vocab_size * run.gpt.n_embd)
    ends: dict[int, list[int]] = {rank: [] for rank in order}
    both = step.add_collective("tied table", COMPUTE, tied, ends) if len(order) > 1 else {}
    for rank in order:
        stages = range(rank, len(sizes), run.pp_size)
        rest = (
            run.gpt.padded_vocab_size * run.gpt.n_embd * ((0 in stages) + (len(sizes) - 1 in stages and len(order) > 1))
        )
        update = layers.optimizer(sum(sizes[s] for s in stages), rest)
        step.add("optimizer", rank, COMPUTE, update, [both[rank]] if both else [])
    return step


def _stage_work(layers: LayersHere, sizes: Sequence[int], stage: int, kind: str, checkpointing: str) -> Work:
    """Return what a stage does for a micro-batch in one direction. The halves of a backward have as many products each."""
    share = 0.5 if kind in (INPUT, WEIGHT) else 1.0
    block = {layers.part("block forward"): 1.0} if kind == FORWARD else layers.backward(checkpointing)
    head = {layers.part("head forward" if kind == FORWARD else "head backward"): share}
    own = {Operation("stage", (), HERE): 1.0}
    return added(own, times(share * sizes[stage], block), head if stage == len(sizes) - 1 else {})
