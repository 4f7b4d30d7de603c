"""What one training step of a split model does, as work on streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gptscale.foresight.time.operations import BYTES, BlockShape, HeadShape, MessageShape, StateShape
from gptscale.foresight.time.schedules import BACKWARD, FORWARD, Order, needs, order_of_schedule
from gptscale.foresight.time.work import COMPUTE, GATHER, P2P, REDUCE, Operation, StepWork, added, times


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
    """The devices of a cluster. link: a name for what connects them, as costs are filed under it."""

    device: str
    per_node: int
    link: str


@dataclass(frozen=True)
class Split:
    """How a stack splits and runs a step.

    blocks: of each stage, first to last. zero: 0 none, 1 the optimizer, 3 all (FSDP). recompute: blocks are computed again in
    backward. p2p_waits: a stage computes nothing while it sends or receives. scattered_p2p: each tensor rank sends
    its part of the activations only.
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
        per_node = min(ranks, -(-self.machines.per_node // stride))
        # Inside a node every pair has a way of its own; those that leave it share its links.
        sharing = 1 if per_node == ranks else max(1, self.machines.per_node // per_node)
        shape = MessageShape(int(n_bytes), ranks, per_node, sharing)
        return Operation(kind, shape, self.machines.link)

    def block_work(self, direction: str) -> dict[Operation, float]:
        """Return the work of a block in one direction, with the collectives of its tensor ranks."""
        work = {self.on_device(f"block {direction}", self.block): 1.0}
        if self.split.tp > 1:
            work[self.on_link("all-reduce", BYTES * self.tokens * self.model.hidden, self.split.tp, 1)] = 2.0
        return work

    def stage_work(self, stage: int, kind: str, blocks: int | None = None) -> dict[Operation, float]:
        """Return the work of a stage for one micro-batch: its blocks, and on the last stage the head."""
        blocks = self.split.blocks[stage] if blocks is None else blocks
        forward = times(blocks, self.block_work("forward"))
        head = {}
        if stage == len(self.split.blocks) - 1:
            head = {self.on_device("head forward" if kind == FORWARD else "head backward", self.head): 1.0}
        if kind == FORWARD:
            return added(forward, head)
        return added(forward if self.split.recompute else {}, times(blocks, self.block_work("backward")), head)

    def message(self, stage: int) -> dict[Operation, float]:
        """Return the send of activations from a stage to the next."""
        stride, per_node = self.split.dp * self.split.tp, self.machines.per_node
        rank = stage % self.split.pp
        inside = rank * stride // per_node == (rank + 1) % self.split.pp * stride // per_node
        sharing = 1 if inside else min(per_node, stride)
        n_bytes = BYTES * self.tokens * self.model.hidden // (self.split.tp if self.split.scattered_p2p else 1)
        return {Operation("send", MessageShape(n_bytes, 2, 1 + inside, sharing), self.machines.link): 1.0}

    def parameters(self, stages: list[int]) -> int:
        """Return the parameters that a rank holds, with the tables of first and last stage."""
        n = sum(self.split.blocks[stage] for stage in stages) * self.model.block_parameters
        last = len(self.split.blocks) - 1
        n += self.model.table_parameters * ((0 in stages) + (last in stages and (last > 0 or not self.model.tied)))
        return max(1, n // self.split.tp)

    def order(self) -> Order:
        """Return what each pipeline rank computes, in order."""
        s = self.split
        return order_of_schedule(s.schedule, s.pp, s.stages_per_rank, s.micro_batches)


def pipeline_step(model: ModelShape, split: Split, machines: Machines) -> StepWork:
    """Return the step of a model whose stages, tensor ranks and data ranks are split as `split` says.

    With one stage it is a step of data and tensor parallelism.
    """
    write, step = StepWriter(model, split, machines), StepWork()
    n_stages, order = len(split.blocks), write.order()
    places: dict[tuple[str, int, int], int] = {}
    pending: list[tuple[int, tuple[str, int, int]]] = []
    sends = [step.place_of(write.message(stage)) for stage in range(n_stages)]
    kinds = [(stage, kind) for stage in range(n_stages) for kind in (FORWARD, BACKWARD)]
    work = {(stage, kind): step.place_of(write.stage_work(stage, kind)) for stage, kind in kinds}
    last: dict[int, list[int]] = {}
    for rank, computations in order.items():
        for kind, stage, m in computations:
            from_others = needs(kind, stage, m, n_stages)
            to_next, to_former = sends[stage], sends[stage - 1]
            incoming, outgoing = (to_former, to_next) if kind == FORWARD else (to_next, to_former)
            if from_others and split.p2p_waits:
                pending.append((step.add(f"receive {kind}{m}", rank, COMPUTE, incoming), from_others[0]))
            place = step.add(f"{kind}{m} of stage {stage}", rank, COMPUTE, work[stage, kind])
            if from_others and not split.p2p_waits:
                pending.append((place, from_others[0]))
            leaves = stage < n_stages - 1 if kind == FORWARD else stage > 0
            places[kind, stage, m] = place
            if leaves and split.p2p_waits:
                step.add(f"send {kind}{m}", rank, COMPUTE, outgoing)
            elif leaves:
                places[kind, stage, m] = step.add(f"send {kind}{m}", rank, P2P, outgoing, (place,))
            last[rank] = [place]
    for place, computation in pending:
        item = step.items[place]
        step.items[place] = item._replace(needs=(*item.needs, places[computation]))
    _finish(step, write, last)
    return step


def _finish(step: StepWork, write: StepWriter, last: dict[int, list[int]]) -> None:
    """Append what follows the last backward of each rank: reduced gradients, the optimizer, weights gathered again."""
    split, model = write.split, write.model
    n_stages = len(split.blocks)
    for rank, before in last.items():
        stages = [stage for stage in range(n_stages) if stage % split.pp == rank]
        parameters = write.parameters(stages)
        if split.dp > 1:
            kind = "gradient reduce-scatter" if split.zero else "gradient all-reduce"
            reduced = write.on_link(kind, split.gradient_bytes * parameters, split.dp, split.tp)
            before = [step.add("gradients", rank, COMPUTE, {reduced: 1.0}, before)]
        if model.tied and n_stages > 1 and (0 in stages or n_stages - 1 in stages):
            table = split.gradient_bytes * model.table_parameters / split.tp
            both = write.on_link("gradient all-reduce", table, 2, split.dp * split.tp * (split.pp - 1))
            before = [step.add("tied table", rank, COMPUTE, {both: 1.0}, before)]
        owned = max(1, parameters // split.dp) if split.zero else parameters
        update = {write.on_device("optimizer", StateShape(owned)): 1.0, write.on_device("host", ()): 1.0}
        before = [step.add("optimizer", rank, COMPUTE, update, before)]
        if split.zero and split.dp > 1:
            gathered = write.on_link("weight all-gather", BYTES * parameters, split.dp, split.tp)
            step.add("weights", rank, COMPUTE, {gathered: 1.0}, before)


def sharded_step(model: ModelShape, split: Split, machines: Machines, prefetch: int = 1) -> StepWork:
    """Return the step of FSDP: each block is gathered before it computes, and its gradients are reduced behind it.

    prefetch: how many blocks are gathered ahead of the one that computes.
    """
    write, step = StepWriter(model, split, machines), StepWork()
    block_bytes = BYTES * model.block_parameters // split.tp
    gather = {write.on_link("all-gather", block_bytes, split.dp, split.tp): 1.0}
    reduce_bytes = split.gradient_bytes * model.block_parameters // split.tp
    reduce = {write.on_link("reduce-scatter", reduce_bytes, split.dp, split.tp): 1.0}
    table_bytes = BYTES * model.table_parameters // split.tp
    gather_table = {write.on_link("all-gather", table_bytes, split.dp, split.tp): 1.0}
    reduce_table = {write.on_link("reduce-scatter", table_bytes, split.dp, split.tp): 1.0}
    forward, again = write.block_work("forward"), write.block_work("forward") if split.recompute else {}
    backward = added(again, write.block_work("backward"))
    computed: list[int] = []

    def compute(name: str, work: dict[Operation, float], gathers: dict[Operation, float]) -> int:
        needed = (computed[-1 - prefetch],) if len(computed) > prefetch else ()
        ready = (step.add(f"gather {name}", 0, GATHER, gathers, needed),) if split.dp > 1 else ()
        computed.append(step.add(name, 0, COMPUTE, work, ready))
        return computed[-1]

    reduced: list[int] = []
    for m in range(split.micro_batches):
        for layer in range(model.n_layer):
            compute(f"forward {m}.{layer}", forward, gather)
        compute(f"head {m}", write.stage_work(len(split.blocks) - 1, FORWARD, 0), gather_table)
        done = step.add(f"head backward {m}", 0, COMPUTE, write.stage_work(len(split.blocks) - 1, BACKWARD, 0))
        for layer in reversed(range(model.n_layer)):
            done = compute(f"backward {m}.{layer}", backward, gather)
            if split.dp > 1:
                reduced.append(step.add(f"reduce {m}.{layer}", 0, REDUCE, reduce, (done,)))
        if split.dp > 1:
            reduced.append(step.add(f"reduce table {m}", 0, REDUCE, reduce_table, (done,)))
    owned = write.parameters(list(range(len(split.blocks)))) // split.dp
    update = {write.on_device("optimizer", StateShape(owned)): 1.0, write.on_device("host", ()): 1.0}
    step.add("optimizer", 0, COMPUTE, update, [*reduced[-1:], computed[-1]])
    return step


Builder = Callable[[ModelShape, Split, Machines], StepWork]
