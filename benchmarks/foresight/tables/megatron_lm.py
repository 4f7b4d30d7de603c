"""Megatron-LM's golden values: small GPTs of its tests on 8 GPUs.

Their steps are bound by the host's launches, and repeated tests differ by 12 %. Rows with experts, context parallelism, FSDP, fp8
or offloading are refused. Source: NVIDIA/Megatron-LM, tests/functional_tests/test_cases.
"""

from __future__ import annotations

from benchmarks.foresight.tables.rows import CellsOfRow, MeasuredRun, Profile
from gptscale.foresight.time.split import Machines, ModelShape, Split
from gptscale.foresight.time.steps import pipeline_step

# The vocabulary of rows that name none.
PER_NODE, DEVICES, VOCABULARY = 8, 8, 51200
PLACES = {
    "a100": ("a100-80", "nvlink3 ib-800"),
    "h100": ("h100-80", "nvlink4 ib-3200"),
    "gb200": ("gb200", "nvlink5 ib-3200"),
}
# Columns of what the step's description leaves out. A value other than these means that the row uses it.
LEFT_OUT = (
    "num-experts",
    "use-torch-fsdp2",
    "use-megatron-fsdp",
    "fp8-format",
    "optimizer-cpu-offload",
    "num-layers-per-virtual-pipeline-stage",
)
UNUSED = ("", "0", "false", "False")


def read(row: CellsOfRow) -> MeasuredRun:
    """Return the run of a row."""
    if not row.text("iteration_time_s_median"):
        return MeasuredRun(None, None, cannot="no time was measured")
    seconds = row.number("iteration_time_s_median")
    machine = next((name for name in ("gb200", "a100", "h100") if name in row.text("machine")), "")
    needed = ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "global-batch-size")
    used = [title for title in LEFT_OUT if row.text(title) not in UNUSED]
    empty = [title for title in needed if not row.text(title)]
    if used or empty or not machine or not row.text("case").startswith("gpt/"):
        reason = f"{', '.join(used)} is not described" if used else "it is no plain GPT on a known machine"
        return MeasuredRun(None, seconds, cannot=reason)
    if row.text("context-parallel-size") not in ("", "1"):
        return MeasuredRun(None, seconds, cannot="context parallelism is not described")
    layers, hidden, heads, seq_len, micro_batch, batch = (row.whole(title) for title in needed)
    tp, pp = (
        row.whole(f"{kind}-model-parallel-size") if row.text(f"{kind}-model-parallel-size") else 1 for kind in KINDS
    )
    dp = DEVICES // (tp * pp)
    if not dp or layers % pp or batch % (dp * micro_batch):
        return MeasuredRun(None, seconds, cannot="the splits do not divide 8 devices, the layers or the batch")
    feed_forward = row.whole("ffn-hidden-size") if row.text("ffn-hidden-size") else 4 * hidden
    groups = row.whole("num-query-groups") if row.text("num-query-groups") else heads
    vocabulary = row.whole("vocab-size") if row.text("vocab-size") else VOCABULARY
    gated, untied = (row.text(title) == "true" for title in ("swiglu", "untie-embeddings-and-output-weights"))
    model = ModelShape(layers, hidden, heads, seq_len, vocabulary, groups, feed_forward, gated, not untied, True)
    split = Split(
        dp,
        tp,
        pp,
        micro_batch,
        batch // (dp * micro_batch),
        (layers // pp,) * pp,
        zero=int(row.text("use-distributed-optimizer") == "true"),
        recompute=row.text("recompute-granularity") == "full",
        sequence_parallel=row.text("sequence-parallel") == "true",
        gradient_bytes=4,
    )
    step = pipeline_step(model, split, Machines(PLACES[machine][0], PER_NODE, PLACES[machine][1]))
    return MeasuredRun(step, seconds, 0.1)


KINDS = ("tensor", "pipeline")
MEGATRON_LM = Profile(
    "Megatron-LM golden values",
    "small GPTs of Megatron-LM's tests on 8 A100, H100 or GB200",
    (
        "case",
        "machine",
        "iteration_time_s_median",
        "num-layers",
        "hidden-size",
        "num-attention-heads",
        "seq-length",
        "micro-batch-size",
        "global-batch-size",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
    ),
    read,
    tuple(PLACES.values()),
)
