"""Tables of splits that others measured: of each row its split and its step, and which recipe of ours splits so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

PER_NODE = 8
AXES = ("tp", "dp", "pp")
# GPT-2's vocabulary, filled up to a multiple of 128 for each tensor rank as Megatron does.
VOCABULARY = 51200
VTRAIN_AXES = dict(zip(AXES, ("tensor parallelism", "data parallelism", "pipeline parallelism"), strict=True))
# vTrain's columns of a group, and their options of ours.
VTRAIN_SHAPE = {
    "hidden size": "n_embd",
    "# layers": "n_layer",
    "attention heads": "n_head",
    "sequence length": "seq_len",
}
NANOTRON_LEFT_OUT = ("80B",)
NANOTRON_NODES_MAX = 8


class Machine(NamedTuple):
    """Where a table was measured: the device, its links between nodes, and the torch of the day, "" for today's.

    reached: bytes a second that collectives of so many nodes reached between them, where that was measured.
    """

    device: str
    links: str
    torch: str = ""
    reached: Mapping[int, float] = {}


# Both nodes of the authors: eight A100 behind switches, and 800 Gb/s between nodes (vTrain, arXiv 2312.12391, section 4).
VTRAIN = Machine("a100-80", "ib-800")
# Nodes of eight H100 with EFA, of winter 2024. Its own NCCL tests told the bytes a second of an all-gather of 256 MB.
NANOTRON = Machine("h100-80", "efa-3200", "2.5", {2: 184.61e9, 4: 118.97e9, 8: 69.0e9})


@dataclass(frozen=True)
class MeasuredSplit:
    """A row of a table.

    group: what rows have in common that differ in their split alone. options: of the model and the batch, for RunConfig.
    seconds, memory_gb: None where it crashed, and where the table does not say. zero: 1 if data ranks share the optimizer's
    state.
    """

    group: tuple[Any, ...]
    machine: Machine
    gpus: int
    split: Mapping[str, int]
    options: Mapping[str, Any]
    seconds: float | None
    memory_gb: float | None = None
    zero: int = 0

    @property
    def recipe(self) -> str:
        """Return the recipe that splits so. With tensor ranks or stages, none of ours cuts the optimizer's state alone."""
        tp, pp = self.split["tp"], self.split["pp"]
        if tp == pp == 1:
            return "zero1" if self.zero else "ddp"
        return "tensor_parallel" if tp == self.gpus else "pipeline" if pp == self.gpus else "hybrid_3d"

    @property
    def name(self) -> str:
        """Return the split in few words."""
        words = [f"{axis}{size}" for axis, size in self.split.items()] + [f"zero{self.zero}"] * bool(self.zero)
        return " ".join([*words, "micro", str(self.options["micro_batch_size"])])


def vtrain(row: Mapping[str, str]) -> MeasuredSplit:
    """Return a row of vTrain's tables of Megatron-DeepSpeed, which recomputes everything."""
    gpus, batch = int(row["# GPUs"]), int(row["global batch"])
    options: dict[str, Any] = {ours: int(row[theirs]) for theirs, ours in VTRAIN_SHAPE.items()}
    options |= {"vocab_size": VOCABULARY, "activation_checkpointing": "full"}
    options |= {"micro_batch_size": int(row["micro batch"]), "global_batch_size": batch}
    split = {axis: int(row[name]) for axis, name in VTRAIN_AXES.items()}
    group = (gpus, batch, options["n_embd"], options["n_layer"])
    return MeasuredSplit(group, VTRAIN, gpus, split, options, float(row["iteration time (ms)"]) / 1e3)


def nanotron(row: Mapping[str, str]) -> MeasuredSplit | None:
    """Return a row of nanotron's table, None if its model or its number of nodes is too large here."""
    nodes = int(row["nodes"])
    if row["model"] in NANOTRON_LEFT_OUT or nodes > NANOTRON_NODES_MAX:
        return None
    gpus, batch, tokens = nodes * PER_NODE, int(row["gbs"]), int(row["seq_len"])
    options: dict[str, Any] = {"model": f"nanotron-{row['model']}", "seq_len": tokens}
    options |= {"micro_batch_size": int(row["mbs"]), "global_batch_size": batch}
    ok = row["status"] == "ok"
    seconds, memory = (batch * tokens / float(row["tok_s"]), float(row["gpu_memory_gb"])) if ok else (None, None)
    split = {axis: int(row[axis]) for axis in AXES}
    return MeasuredSplit((row["model"], nodes), NANOTRON, gpus, split, options, seconds, memory, int(row["zero"]))


# By a column that no other table has.
READERS = {"iteration time (ms)": vtrain, "tok_s_gpu": nanotron}
