"""Measured collectives: vTrain's all-reduces inside a node, and the Ultra-Scale Playbook's bandwidths over nodes.

Each row is a step of one operation, so the same calibration reads it.
"""

from __future__ import annotations

from benchmarks.foresight.tables.nanotron import PLACE as H100_PLACE
from benchmarks.foresight.tables.rows import CellsOfRow, MeasuredRun, Profile
from benchmarks.foresight.tables.vtrain import CLUSTER as A100_PLACE
from gptscale.foresight.time.operations import MessageShape
from gptscale.foresight.time.work import COMPUTE, Operation, StepWork

LINKS = {"a100": A100_PLACE[1], "v100": "nvlink2 ib-100"}
KINDS = {"AllReduce": ("all-reduce", 2), "AllGather": ("all-gather", 1), "ReduceScatter": ("reduce-scatter", 1)}
# The playbook measured with messages of this size.
PLAYBOOK_BYTES = 256 * 2**20


def _run(kind: str, shape: MessageShape, link: str, seconds: float) -> MeasuredRun:
    step = StepWork()
    step.add(kind, 0, COMPUTE, {Operation(kind, shape, link): 1.0})
    return MeasuredRun(step, seconds, 0.03)


def read_all_reduce(row: CellsOfRow) -> MeasuredRun:
    """Return an all-reduce inside a node."""
    seconds, ranks = row.number("time_ns_out_of_place") / 1e9, row.whole("n_gpus")
    if row.text("gpu") not in LINKS:
        return MeasuredRun(None, seconds, cannot=f"links of {row.text('gpu')!r} are not known")
    return _run("all-reduce", MessageShape(row.whole("size_B"), ranks, ranks, 1), LINKS[row.text("gpu")], seconds)


def read_bandwidth(row: CellsOfRow) -> MeasuredRun:
    """Return a collective over whole nodes from its bus bandwidth."""
    ranks, bandwidth = 8 * row.whole("nodes_of_8"), row.number("GB_per_s_mean") * 1e9
    if row.text("collective") not in KINDS:
        return MeasuredRun(None, None, cannot=f"collective {row.text('collective')!r} is not known")
    kind, turns = KINDS[row.text("collective")]
    seconds = turns * (ranks - 1) / ranks * PLAYBOOK_BYTES / bandwidth
    return _run(kind, MessageShape(PLAYBOOK_BYTES, ranks, 8, 1), H100_PLACE[1], seconds)


ALL_REDUCES = Profile(
    "NCCL all-reduce",
    "all-reduces inside a node of A100 or V100",
    ("gpu", "n_gpus", "size_B", "time_ns_out_of_place"),
    read_all_reduce,
    (A100_PLACE, ("v100", "nvlink2 ib-100")),
)
BANDWIDTHS = Profile(
    "NCCL bandwidth",
    "collectives of 256 MiB over nodes of 8 H100",
    ("collective", "nodes_of_8", "GB_per_s_mean"),
    read_bandwidth,
    (H100_PLACE,),
)
