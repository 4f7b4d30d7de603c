"""vTrain's measured iterations: GPTs on A100s by Megatron-DeepSpeed.

The stack runs 1F1B with blocking sends, of which each tensor rank carries a part. It computes every block again in backward, and
reduces gradients in fp32 behind the last backward. Source: VIA-Research/vTrain, data/ground_truth_single.csv and
ground_truth_multi.csv.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.foresight.tables.rows import CellsOfRow, MeasuredRun, Profile
from gptscale.foresight.time.split import Machines, ModelShape, Split
from gptscale.foresight.time.steps import pipeline_step

# The table of one node, and that of a cluster. They are machines of their own: the cluster computes the same shapes a quarter
# more slowly. On the node, where the host limits small shapes, what a collective adds to a step is not what NCCL's tests measure.
NODE = ("a100-80@node", "nvlink3 ib-800@node")
CLUSTER = ("a100-80", "nvlink3 ib-800")
PER_NODE = 8
# GPT-2's vocabulary, padded as Megatron does for 8 tensor ranks.
VOCABULARY = 51200


def read(row: CellsOfRow) -> MeasuredRun:
    """Return the run of a row."""
    hidden, layers, heads = row.whole("hidden size"), row.whole("# layers"), row.whole("attention heads")
    dp, tp, pp = (row.whole(f"{kind} parallelism") for kind in ("data", "tensor", "pipeline"))
    batch, micro_batch, seq_len = row.whole("global batch"), row.whole("micro batch"), row.whole("sequence length")
    devices, seconds = row.whole("# GPUs"), row.number("iteration time (ms)") / 1e3
    group = f"{devices} GPUs, {layers} x {hidden}, batch {batch}"
    # Runs on one node repeat within 0.6 %. Those on shared networks differ by several per cent.
    noise = 0.01 if devices <= PER_NODE else 0.04
    if dp * tp * pp != devices or layers % pp or batch % (dp * micro_batch):
        reason = "the splits do not multiply to the devices, or do not divide layers and batch"
        return MeasuredRun(None, seconds, noise, cannot=reason, group=group)
    model = ModelShape(layers, hidden, heads, seq_len, VOCABULARY, heads, 4 * hidden)
    split = Split(dp, tp, pp, micro_batch, batch // (dp * micro_batch), (layers // pp,) * pp)
    split = replace(split, recompute=True, scattered_p2p=True, gradient_bytes=4)
    device, link = NODE if devices <= PER_NODE else CLUSTER
    step = pipeline_step(model, split, Machines(device, PER_NODE, link))
    return MeasuredRun(step, seconds, noise, group=group, tokens=batch * seq_len / devices)


VTRAIN = Profile(
    "vTrain",
    "Megatron-DeepSpeed on A100: 1F1B, full recomputation",
    (
        "# GPUs",
        "global batch",
        "micro batch",
        "hidden size",
        "attention heads",
        "# layers",
        "sequence length",
        "tensor parallelism",
        "data parallelism",
        "pipeline parallelism",
        "iteration time (ms)",
    ),
    read,
    (NODE, CLUSTER),
    choices=True,
)
