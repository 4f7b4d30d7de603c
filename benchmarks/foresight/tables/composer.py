"""llm-foundry's throughput tables: MPT models by Composer's FSDP.

Each block is gathered before it computes, in forward and again in backward, and the next one is gathered meanwhile. Source:
mosaicml/llm-foundry, scripts/train/benchmarking/README.md.
"""

from __future__ import annotations

from benchmarks.foresight.tables.rows import CellsOfRow, MeasuredRun, Profile
from gptscale.foresight.time.operations import BYTES, StateShape
from gptscale.foresight.time.schedules import BACKWARD, FORWARD
from gptscale.foresight.time.split import Machines, ModelShape, Split, StepWriter
from gptscale.foresight.time.work import COMPUTE, GATHER, REDUCE, Operation, StepWork, added

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
    forward = write.block_work("forward")
    backward = added(write.again(), write.block_work("backward"))
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
