"""The Ultra-Scale Playbook's sweep: Llama-like models on H100s by nanotron.

The stack runs 1F1B with blocking sends, keeps all activations, accumulates gradients in fp32, and reduces them beside backward.
ZeRO-1 splits master weights and moments over data ranks. Tensor ranks send beside their products. Whether they split the sequence
is not recorded, but the memory of the runs says so. Source: huggingface/nanotron, the playbook's benchmarks.
"""

from __future__ import annotations

from benchmarks.foresight.tables.rows import CellsOfRow, MeasuredRun, MemoryParts, Profile
from gptscale.foresight.time.split import Machines, ModelShape, Split
from gptscale.foresight.time.steps import pipeline_step

PLACE = ("h100-80", "nvlink4 efa-3200")
# The links for tensor ranks while stages send each other messages: each hop then takes much longer.
BESIDE_STAGES = ("h100-80", "nvlink4 efa-3200@stages")
PER_NODE, CAPACITY_GB, VOCABULARY, SEQ_LEN = 8, 80.0, 131072, 4096
# Layers, width, heads, heads of keys and values, width of the feed-forward part, and whether the head is the table. The
# parameters that the table's MFU was counted with agree to 0.2 %.
MODELS = {
    "1B": (16, 2048, 32, 32, 8192, True),
    "3B": (28, 3072, 24, 24, 8192, True),
    "8B": (32, 4096, 32, 32, 14336, False),
    "80B": (80, 8192, 64, 8, 28672, False),
}

# Bytes of what `_elements` counts. Weights in 16 bits with gradients in fp32; master weights and moments; what the matrices of a
# block keep in 16 bits, and its norms; logits in both precisions; what else is there, in GB.
EXPECTED_BYTES = (6.0, 12.0, 9.0, 4.0, 6.0, 1.0)


def read(row: CellsOfRow) -> MeasuredRun:
    """Return the run of a row."""
    name, seq_len = row.text("model"), row.whole("seq_len")
    dp, pp, tp = row.whole("dp"), row.whole("pp"), row.whole("tp")
    micro_batch, micro_batches, zero = row.whole("mbs"), row.whole("grad_acc"), row.text("zero")
    tokens = micro_batch * micro_batches * seq_len / (pp * tp)
    seconds = tokens / row.number("tok_s_gpu") if row.text("status") == "ok" else None
    group = f"{name} on {row.whole('nodes')} nodes"
    if dp * micro_batch * micro_batches != row.whole("gbs"):
        reason = "the batch is not the product of data ranks, micro-batch and accumulation"
        return MeasuredRun(None, seconds, cannot=reason, group=group)
    if name not in MODELS or zero not in ("0", "1"):
        return MeasuredRun(None, seconds, cannot=f"model {name!r} or zero {zero!r} is not known", group=group)
    layers, hidden, heads, key_value_heads, feed_forward, tied = MODELS[name]
    model = ModelShape(
        layers, hidden, heads, seq_len, VOCABULARY, key_value_heads, feed_forward, True, tied, fused_attention=True
    )
    blocks, cannot_start = stage_blocks(model, pp), ""
    if pp > layers:
        cannot_start = f"{pp} stages have only {layers} blocks"
    elif micro_batches < pp - 1:
        cannot_start = f"nanotron's 1F1B needs {pp - 1} micro-batches, not {micro_batches}"
    split = Split(
        dp,
        tp,
        pp,
        micro_batch,
        micro_batches,
        blocks,
        zero=int(zero),
        gradient_bytes=4,
        sequence_parallel=tp > 1,
        gathered_sequence=True,
        norm_bytes=2,
        overlaps_gradients=True,
        tensor_beside=True,
        tensor_link=BESIDE_STAGES[1] if pp > 1 else "",
    )
    step = pipeline_step(model, split, Machines(PLACE[0], PER_NODE, PLACE[1]))
    measured_gb = row.number("gpu_memory_gb") if seconds and row.text("gpu_memory_gb") else None
    memory = MemoryParts((_elements(model, split, 0), _elements(model, split, pp - 1)), EXPECTED_BYTES, CAPACITY_GB)
    return MeasuredRun(step, seconds, 0.1, "", cannot_start, group, tokens, memory, measured_gb)


def stage_blocks(model: ModelShape, n_stages: int) -> tuple[int, ...]:
    """Return the blocks of each stage: a stage ends when it has its share of the multiplications, head included."""
    head = model.table_parameters / model.block_parameters
    share = (model.n_layer + head) / n_stages
    blocks, stage = [0] * n_stages, 0
    for block in range(model.n_layer):
        blocks[stage] += 1
        if block + 1 > share * (stage + 1) and stage < n_stages - 1:
            stage += 1
    return tuple(blocks)


def _elements(model: ModelShape, split: Split, stage: int) -> tuple[float, ...]:
    """Return how many of each kind of element a rank of a stage holds, per byte that is calibrated for it."""
    parameters: float = split.blocks[stage] * model.block_parameters
    if stage in (0, split.pp - 1):
        parameters += model.table_parameters * (1 if model.tied or split.pp > 1 else 2)
    parameters /= split.tp
    tokens = split.micro_batch * model.seq_len
    live_tokens = split.blocks[stage] * min(split.micro_batches, split.pp - stage) * tokens
    logits = tokens * model.vocabulary / split.tp if stage == split.pp - 1 else 0.0
    return (
        parameters,
        parameters / (split.dp if split.zero else 1),
        live_tokens * (model.hidden + model.feed_forward) / split.tp,
        live_tokens * model.hidden,
        logits,
        1e9,
    )


NANOTRON = Profile(
    "Ultra-Scale Playbook",
    "nanotron on H100: 1F1B, ZeRO 0 or 1, no recomputation",
    (
        "model",
        "nodes",
        "dp",
        "pp",
        "tp",
        "zero",
        "mbs",
        "grad_acc",
        "gbs",
        "seq_len",
        "tok_s_gpu",
        "gpu_memory_gb",
        "status",
    ),
    read,
    (PLACE, BESIDE_STAGES),
    choices=True,
)
