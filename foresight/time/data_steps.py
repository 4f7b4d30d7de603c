"""What one training step of data ranks does: what they gather, reduce and copy, and what runs beside the computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gptscale.foresight.time.operations import AmountShape, StateShape
from gptscale.foresight.time.schedules import BACKWARD, FORWARD
from gptscale.foresight.time.split import StepWriter
from gptscale.foresight.time.work import (
    COMPUTE,
    DISK,
    FROM_HOST,
    GATHER,
    HOST,
    REDUCE,
    TO_HOST,
    Operation,
    StepWork,
    added,
    times,
)

# Parameters that ZeRO-Infinity steps at once, DeepSpeed's default.
SUB_GROUP = 1_000_000_000


@dataclass(frozen=True)
class Exchange:
    """How data ranks share a model.

    shards: ranks that cut it; the others replicate these. gathers: how often a micro-batch gathers a block: 0, 1 (kept until its
    backward) or 2. reduces: the collective of gradients, "" for none. every: gradients are reduced after each micro-batch, not
    only after the last. overlaps: beside backward. bucket: bytes of gradients that are sent at once, 0 for those of a block.
    cut_state: each rank steps its part only. weights_after: bytes of a number of the new weights that are gathered behind the
    optimizer, 0 for none. offload: where the optimizer's state lives, and, if blocks are gathered, their weights.
    """

    shards: int = 1
    gathers: int = 0
    reduces: str = ""
    every: bool = False
    overlaps: bool = True
    bucket: int = 0
    cut_state: bool = False
    weights_after: int = 0
    offload: Literal["none", "cpu", "nvme"] = "none"
    stored_bytes: int = 4
    prefetch: int = 1


class DataStep:
    """Write the step of one data rank. All do the same."""

    def __init__(self, write: StepWriter, how: Exchange) -> None:
        self.write, self.how, self.step = write, how, StepWork()
        self.computed: list[int] = []
        self.reduced: list[int] = []
        # Bytes of gradients that no bucket has taken yet.
        self.waiting = 0.0
        model, split = write.model, write.split
        self.block = max(1, model.block_parameters // split.tp)
        self.table = max(1, model.table_parameters // split.tp)
        self.sharing = write.machines.per_node

    def written(self) -> StepWork:
        """Return the whole step."""
        write, model, last = self.write, self.write.model, len(self.write.split.blocks) - 1
        forward, backward = write.block_work("forward"), added(write.again(), write.block_work("backward"))
        head, head_backward = write.stage_work(last, FORWARD, 0), write.stage_work(last, BACKWARD, 0)
        for m in range(write.split.micro_batches):
            is_last = m == write.split.micro_batches - 1
            for layer in range(model.n_layer):
                self._compute(f"forward {m}.{layer}", forward, self.block)
            # The table is gathered once, and kept for its backward.
            self._compute(f"head {m}", head, self.table)
            self._compute(f"head backward {m}", head_backward, 0)
            for layer in reversed(range(model.n_layer)):
                again = self.block if self.how.gathers > 1 else 0
                self._compute(f"backward {m}.{layer}", backward, again)
                self._reduce(f"reduce {m}.{layer}", self.block, is_last)
            self._reduce(f"reduce table {m}", self.table, is_last, flush=True)
        self._optimize()
        return self.step

    def _on_device(self, kind: str, amount: float, sharing: int = 1) -> dict[Operation, float]:
        return {self.write.on_device(kind, AmountShape(int(amount), sharing)): 1.0}

    def _collective(self, kind: str, n_bytes: float) -> dict[Operation, float]:
        """Return a collective of the ranks that cut the model, and behind a reduction that of their replicas."""
        write, split, shards = self.write, self.write.split, self.how.shards
        work: dict[Operation, float] = {}
        if shards > 1:
            work[write.on_link(kind, n_bytes, shards, split.tp)] = 1.0
        replicas = split.dp // shards
        if replicas > 1 and kind == self.how.reduces:
            work = added(work, {write.on_link("all-reduce", n_bytes / shards, replicas, split.tp * shards): 1.0})
        return work

    def _compute(self, name: str, work: dict[Operation, float], gathered: int) -> None:
        """Append a computation, and before it the gathering of its parameters, as early as prefetching allows."""
        how = self.how
        ready: tuple[int, ...] = ()
        if gathered and how.gathers and (how.shards > 1 or how.offload != "none"):
            early = tuple(self.computed[-1 - how.prefetch :][:1]) if len(self.computed) > how.prefetch else ()
            if how.offload != "none":
                own = how.stored_bytes * gathered / how.shards
                if how.offload == "nvme":
                    early = (
                        self.step.add(f"read {name}", 0, DISK, self._on_device("disk read", own, self.sharing), early),
                    )
                early = (self.step.add(f"copy {name}", 0, FROM_HOST, self._on_device("copy from host", own), early),)
            n_bytes = self.write.split.compute_bytes * gathered
            ready = (self.step.add(f"gather {name}", 0, GATHER, self._collective("all-gather", n_bytes), early),)
        self.computed.append(self.step.add(name, 0, COMPUTE, work, ready))

    def _reduce(self, name: str, parameters: int, is_last: bool, flush: bool = False) -> None:
        """Append the reduction of a block's gradients, or put them into the bucket until it is full."""
        how, width = self.how, self.write.split.gradient_bytes
        if not how.reduces and how.offload == "none":
            return
        if not (is_last or how.every):
            return
        self.waiting += width * parameters
        if not flush and self.waiting < how.bucket:
            return
        size = min(self.waiting, how.bucket or self.waiting)
        work = times(self.waiting / size, self._collective(how.reduces, size)) if how.reduces else {}
        place = self.computed[-1]
        if work:
            stream = REDUCE if how.overlaps else COMPUTE
            place = self.step.add(name, 0, stream, work, (place,))
            if stream == COMPUTE:
                self.computed.append(place)
        if how.offload != "none":
            own = self.waiting / how.shards
            place = self.step.add(f"copy of {name}", 0, TO_HOST, self._on_device("copy to host", own), (place,))
            if how.offload == "nvme":
                place = self.step.add(
                    f"write of {name}", 0, DISK, self._on_device("disk write", own, self.sharing), (place,)
                )
        self.reduced.append(place)
        self.waiting = 0.0

    def _optimize(self) -> None:
        """Append the optimizer's step, on the device or on the host, and the new weights' way back."""
        write, how, step, before = self.write, self.how, self.step, [*self.reduced[-1:], self.computed[-1]]
        parameters = write.parameters(list(range(len(write.split.blocks))))
        owned = max(1, parameters // how.shards) if how.cut_state else parameters
        host = {write.on_device("host", ()): 1.0}
        if how.offload == "none":
            before = [
                step.add(
                    "optimizer", 0, COMPUTE, {write.on_device("optimizer", StateShape(owned)): 1.0, **host}, before
                )
            ]
        else:
            before = [self._optimize_on_host(owned, before)]
            if not how.gathers:
                back = self._on_device("copy from host", write.split.compute_bytes * owned)
                before = [step.add("weights back", 0, FROM_HOST, back, before)]
            step.add("next step", 0, COMPUTE, host, before)
        if how.weights_after and how.shards > 1:
            gathered = write.on_link("weight all-gather", how.weights_after * parameters, how.shards, write.split.tp)
            step.add("weights", 0, COMPUTE, {gathered: 1.0}, before)

    def _optimize_on_host(self, owned: int, before: list[int]) -> int:
        """Append the host's AdamW, with state on disk one part after another."""
        step, parts = self.step, -(-owned // SUB_GROUP) if self.how.offload == "nvme" else 1
        part = owned / parts
        for i in range(parts):
            if self.how.offload == "nvme":
                # gradients, fp32 weights and two moments
                before = [
                    step.add(f"read state {i}", 0, DISK, self._on_device("disk read", 16 * part, self.sharing), before)
                ]
            before = [
                step.add(f"host step {i}", 0, HOST, self._on_device("host optimizer", part, self.sharing), before)
            ]
            if self.how.offload == "nvme":
                n_bytes = (12 + self.write.split.compute_bytes) * part
                before = [
                    step.add(f"write state {i}", 0, DISK, self._on_device("disk write", n_bytes, self.sharing), before)
                ]
        return before[0]
