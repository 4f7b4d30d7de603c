"""A model, how it is split, the machines, and the operations that follow: what steps.py and data_steps.py write steps of."""

from __future__ import annotations

from dataclasses import dataclass

from gptscale.foresight.time.operations import BYTES, BlockShape, HeadShape, LaunchShape, MessageShape, message_shape
from gptscale.foresight.time.schedules import FORWARD, INPUT, WEIGHT, Order, order_of_schedule
from gptscale.foresight.time.work import BESIDE, LAUNCHES, Operation, added, times

# Kernels and collectives that the host starts in the forward of a block, of the head, and more for tensor ranks.
BLOCK, HEAD, TENSOR = 20, 15, 10


@dataclass(frozen=True)
class ModelShape:
    """A decoder. gated: the feed-forward part has a third matrix. fused_attention: no matrix of scores is stored."""

    n_layer: int
    hidden: int
    heads: int
    seq_len: int
    vocabulary: int
    key_value_heads: int
    feed_forward: int
    gated: bool = False
    tied: bool = True
    fused_attention: bool = False

    @property
    def block_parameters(self) -> int:
        """Return the parameters of a block's matrices. Vectors are too small to matter."""
        h = self.hidden
        return 2 * h * h + 2 * h * h * self.key_value_heads // self.heads + (2 + self.gated) * h * self.feed_forward

    @property
    def table_parameters(self) -> int:
        """Return the parameters of an embedding table."""
        return self.vocabulary * self.hidden


@dataclass(frozen=True)
class Machines:
    """The devices of a cluster.

    link: a name for what connects them, as costs are filed under it. jobs: how many use the links between nodes.
    """

    device: str
    per_node: int
    link: str
    jobs: int = 1


@dataclass(frozen=True)
class Split:
    """How a stack splits and runs a step.

    blocks: of each stage, first to last. zero: 0 none, 1 the optimizer, 3 all (FSDP). recompute: blocks are computed again in
    backward; recompute_elementwise: only what is between their products. p2p_waits: a stage computes nothing while it sends or
    receives. scattered_p2p: each tensor rank sends its part of the activations only. sent_bytes: of a number that a stage sends.
    gathered_sequence: tensor ranks gather and scatter the sequence, as torch does, in place of all-reduces; norm_bytes: of a
    number that a norm gives them. gathers: data ranks cut the weights of a stage's blocks too, which are gathered when they are
    used. overlaps_gradients: those of a block are reduced beside the last backward of the blocks before it. tensor_beside: tensor
    ranks send beside their products. tensor_link: what their collectives are filed under, "" for the machines' link.
    """

    dp: int
    tp: int
    pp: int
    micro_batch: int
    micro_batches: int
    blocks: tuple[int, ...]
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    zero: int = 0
    recompute: bool = False
    sequence_parallel: bool = False
    p2p_waits: bool = True
    gradient_bytes: int = BYTES
    scattered_p2p: bool = False
    recompute_elementwise: bool = False
    compute_bytes: int = BYTES
    sent_bytes: int = BYTES
    gathered_sequence: bool = False
    norm_bytes: int = 4
    gathers: bool = False
    overlaps_gradients: bool = False
    tensor_beside: bool = False
    tensor_link: str = ""


class StepWriter:
    """Write the step of a model under a split. Data ranks and tensor ranks do the same, so one of each is written."""

    def __init__(self, model: ModelShape, split: Split, machines: Machines) -> None:
        self.model, self.split, self.machines = model, split, machines
        s, m = split, model
        self.tokens = s.micro_batch * m.seq_len
        feed = (m.feed_forward, int(m.gated), m.heads, m.key_value_heads)
        flags = (int(m.fused_attention), int(s.sequence_parallel))
        self.block = BlockShape(self.tokens, m.hidden, *feed, m.seq_len, s.tp, *flags)
        self.head = HeadShape(self.tokens, m.hidden, m.vocabulary, s.tp)

    def on_device(self, kind: str, shape: tuple[int, ...]) -> Operation:
        """Return an operation of the device."""
        return Operation(kind, tuple(shape), self.machines.device)

    def on_link(self, kind: str, n_bytes: float, ranks: int, stride: int) -> Operation:
        """Return a collective of ranks that lie `stride` apart."""
        shape = message_shape(n_bytes, ranks, stride, self.machines.per_node, self.machines.jobs)
        return Operation(kind, shape, self.machines.link)

    def block_work(self, direction: str) -> dict[Operation, float]:
        """Return the work of a block in one direction, with the collectives of its tensor ranks."""
        s, numbers = self.split, self.tokens * self.model.hidden
        work = {self.on_device(f"block {direction}", self.block): 1.0}
        # The collectives of tensor ranks cost the host as much as several kernels.
        work |= self.launches((BLOCK + TENSOR * (s.tp > 1)) * (1 if direction == "forward" else 2))
        if s.tp > 1 and s.gathered_sequence:
            # Backward sends the gradient of what a norm gives, and of what a product gives, the other way.
            kinds = ("all-gather", "reduce-scatter") if direction == "forward" else ("reduce-scatter", "all-gather")
            for kind, width in zip(kinds, (s.norm_bytes, s.compute_bytes), strict=True):
                work[self._of_tensor_ranks(kind, width * numbers)] = 2.0
        elif s.tp > 1:
            work[self._of_tensor_ranks("all-reduce", s.compute_bytes * numbers)] = 2.0
        return work

    def _of_tensor_ranks(self, kind: str, n_bytes: float) -> Operation:
        operation = self.on_link(kind, n_bytes, self.split.tp, 1)
        kind = (BESIDE if self.split.tensor_beside else "") + kind
        return operation._replace(kind=kind, on=self.split.tensor_link or operation.on)

    def launches(self, n: int) -> dict[Operation, float]:
        """Return what the host does to start n kernels."""
        return {self.on_device(LAUNCHES, LaunchShape(n, self.split.tp)): 1.0}

    def again(self) -> dict[Operation, float]:
        """Return what the backward of a block computes again."""
        if self.split.recompute_elementwise:
            return {self.on_device("block elementwise", self.block): 1.0} | self.launches(BLOCK // 2)
        return self.block_work("forward") if self.split.recompute else {}

    def stage_work(self, stage: int, kind: str, blocks: int | None = None) -> dict[Operation, float]:
        """Return the work of a stage for one micro-batch: its blocks, and on the last stage the head."""
        blocks = self.split.blocks[stage] if blocks is None else blocks
        head: dict[Operation, float] = {}
        if stage == len(self.split.blocks) - 1:
            head = {self.on_device("head forward" if kind == FORWARD else "head backward", self.head): 1.0}
            head |= self.launches(HEAD * (1 if kind == FORWARD else 2))
        if kind == FORWARD:
            return added(times(blocks, self.block_work("forward")), head)
        backward = added(times(blocks, self.block_work("backward")), head)
        again = times(blocks, self.again())
        if kind == WEIGHT:
            # Half of the products of a backward are for the weights, and none of its collectives.
            on_device = {op: n for op, n in backward.items() if op.on == self.machines.device}
            return times(0.5, on_device)
        if kind == INPUT:
            halves = {op: n * (0.5 if op.on == self.machines.device else 1.0) for op, n in backward.items()}
            return added(again, halves)
        return added(again, backward)

    def gather_block(self) -> dict[Operation, float]:
        """Return the gathering of a block's weights over the data ranks."""
        n_bytes = self.split.compute_bytes * self.model.block_parameters // self.split.tp
        return {self.on_link("all-gather", n_bytes, self.split.dp, self.split.tp): 1.0}

    def message(self, rank: int, other: int) -> dict[Operation, float]:
        """Return the send of activations from a pipeline rank to another."""
        stride, per_node = self.split.dp * self.split.tp, self.machines.per_node
        inside = rank * stride // per_node == other * stride // per_node
        sharing = 1 if inside else self.machines.jobs * min(per_node, stride)
        n_bytes = (
            self.split.sent_bytes
            * self.tokens
            * self.model.hidden
            // (self.split.tp if self.split.scattered_p2p else 1)
        )
        return {Operation("send", MessageShape(n_bytes, 2, 1 + inside, sharing), self.machines.link): 1.0}

    def parameters(self, stages: list[int], blocks: bool = True) -> int:
        """Return the parameters that a rank holds, with the tables of first and last stage, or these tables alone."""
        n = sum(self.split.blocks[stage] for stage in stages) * self.model.block_parameters if blocks else 0
        last = len(self.split.blocks) - 1
        n += self.model.table_parameters * ((0 in stages) + (last in stages and (last > 0 or not self.model.tied)))
        return max(1, n // self.split.tp)

    def order(self) -> Order:
        """Return what each pipeline rank computes, in order."""
        s = self.split
        return order_of_schedule(s.schedule, s.pp, s.stages_per_rank, s.micro_batches)
