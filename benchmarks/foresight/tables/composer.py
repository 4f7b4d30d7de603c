"""llm-foundry's throughput tables: MPT models by Composer's FSDP.

Each block is gathered before it computes, in forward and again in backward, and the next one is gathered meanwhile. Source:
mosaicml/llm-foundry, scripts/train/benchmarking/README.md.
"""

from __future__ import annotations

from benchmarks.foresight.tables.rows import CellsOfRow, MeasuredRun, Profile
from gptscale.foresight.time.split import Machines, ModelShape, Split
from gptscale.foresight.time.steps import sharded_step

PER_NODE, VOCABULARY = 8, 50368
# Layers, width, heads.
MODELS = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
PLACES = {
    "a100_40gb": ("a100-40", "nvlink3 roce-1600"),
    "a100_80gb": ("a100-80", "nvlink3 roce-1600"),
    "h100_80gb": ("h100-80", "nvlink4 ib-3200"),
}
FP8 = ("h100-80 fp8", "nvlink4 ib-3200")


def read(row: CellsOfRow) -> MeasuredRun:
    """Return the run of a row."""
    name, devices, seq_len = row.text("Model"), row.whole("# GPUs"), row.whole("SeqLen (T)")
    tokens = row.whole("GlobalBatchSize") * seq_len
    seconds, group = tokens / row.number("Throughput (T/s)"), f"{name}, {devices} {row.text('GPU')}, T {seq_len}"
    micro_batch, micro_batches = row.whole("MicroBatchSize"), row.whole("GradAccum")
    if name not in MODELS or row.text("GPU") not in PLACES:
        return MeasuredRun(None, seconds, cannot="the model or the GPU is not known", group=group)
    if row.text("Sharding Strategy") != "FULL_SHARD" or row.text("Activation CPUOffload") == "True":
        return MeasuredRun(None, seconds, cannot="only FULL_SHARD without offload is described", group=group)
    layers, hidden, heads = MODELS[name]
    model = ModelShape(layers, hidden, heads, seq_len, VOCABULARY, heads, 4 * hidden, fused_attention=True)
    recompute = row.text("Activation Checkpointing") == "True"
    split = Split(devices, 1, 1, micro_batch, micro_batches, (layers,), zero=3, recompute=recompute)
    device, link = FP8 if "fp8" in row.text("Precision") else PLACES[row.text("GPU")]
    step = sharded_step(model, split, Machines(device, PER_NODE, link))
    return MeasuredRun(step, seconds, 0.02, group=group, tokens=tokens / devices)


COMPOSER = Profile(
    "llm-foundry",
    "MPT by Composer's FSDP on A100 and H100",
    (
        "Model",
        "SeqLen (T)",
        "# GPUs",
        "GPU",
        "MicroBatchSize",
        "GradAccum",
        "GlobalBatchSize",
        "Throughput (T/s)",
        "Precision",
        "Sharding Strategy",
        "Activation Checkpointing",
        "Activation CPUOffload",
    ),
    read,
    (*PLACES.values(), FP8),
    choices=True,
)
