"""Tables of steps that others measured: of each row what its step took, and how programs/fsdp_gpt.py trains the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptscale.common.measure.gpus import GPUS
from gptscale.common.settings.user_file import Refuse, read_rows, read_text

FILE_BYTES_MAX = 2**26
# Every so manieth row of llm-foundry's table.
EVERY = 10

# Layers, hidden size and heads by llm-foundry's names.
GPTS = {
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
# Layers, hidden size, heads, heads of keys and values, inner size and vocabulary: arXiv 2307.09288, 2308.12950 (34B), 2407.21783.
LLAMAS = {
    "Llama 2 7B": (32, 4096, 32, 32, 11008, 32000),
    "Llama 2 13B": (40, 5120, 40, 40, 13824, 32000),
    "Llama 2 34B": (48, 8192, 64, 8, 22016, 32000),
    "Llama 2 70B": (80, 8192, 64, 8, 28672, 32000),
    "Llama 3 8B": (32, 4096, 32, 8, 14336, 128256),
    "Llama 3 70B": (80, 8192, 64, 8, 28672, 128256),
}
FLOAT8 = "amp_fp8"
# Both A100 are one chip with another memory.
DEVICES = {"h100_80gb": "h100-80", "a100_80gb": "a100-80", "a100_40gb": "a100-80"}
MEMORY = {"a100_40gb": next(gpu.memory for gpu in GPUS if gpu.name == "a100-40")}
# More micro-batches take as long as these, and their simulation takes longer.
MICRO_BATCHES = 2
# Not told by fms-fsdp's table. Its docs: 4,096 tokens, and HSDP for models that a node holds. The share of blocks that
# "Selective AC" computes again: of 13B by its HFU over its MFU (0.37 to 0.48 on A100, 0.17 to 0.32 on H100, one configuration);
# of 70B the least quarter with which it fits.
FMS_TOKENS = 4096
FMS_STRATEGY = {"7b": "HYBRID_SHARD"}
FMS_AGAIN = {"13b": 1 / 3, "70b": 3 / 4}
# Its columns' words for both machines, with the GPUs and the links of each.
FMS_MACHINES = {"A100": ("a100-80", 128, "ib-400"), "H100": ("h100-80", 96, "ib-800")}


@dataclass(frozen=True)
class MeasuredStep:
    """A step of a table.

    row: its number in the table. gpu: whose speed it tells. words: options of the program. links: between nodes, "" for what the
    device usually has. memory: bytes a second, where the device has another than its name says. torch: that of the day.
    """

    row: int
    model: str
    gpu: str
    device: str
    gpus: int
    seconds: float
    words: Mapping[str, Any]
    links: str = ""
    memory: float | None = None
    torch: str = "2.3"


def foundry(row: int, cells: Mapping[str, str]) -> Iterator[MeasuredStep]:
    """Yield the step of a row of llm-foundry's table, of at most MICRO_BATCHES micro-batches."""
    if cells["Precision"] == FLOAT8:
        return
    layers, hidden, heads = GPTS[cells["Model"]]
    every = int(cells["GradAccum"])
    accumulate = min(MICRO_BATCHES, every)
    words = {"layers": layers, "hidden": hidden, "heads": heads, "seq": int(cells["SeqLen (T)"])}
    words |= {"batch": int(cells["MicroBatchSize"]), "accumulate": accumulate}
    words |= {"recompute": layers if cells["Activation Checkpointing"] == "True" else 0}
    seconds = int(cells["GlobalBatchSize (T)"]) / float(cells["Throughput (T/s)"]) * accumulate / every
    gpu, strategy = cells["GPU"], cells["Sharding Strategy"]
    how: dict[str, Any] = {"memory": MEMORY.get(gpu), "torch": "2.0", "words": {**words, "strategy": strategy}}
    yield MeasuredStep(row, cells["Model"], gpu, DEVICES[gpu], int(cells["# GPUs"]), seconds, **how)


def yafsdp(row: int, cells: Mapping[str, str]) -> Iterator[MeasuredStep]:
    """Yield the step under FSDP of a row of YaFSDP's table, whose batch is 1."""
    tokens, again = int(cells["seq-len"]), int(cells["num-ckpt-layers"])
    words = {**llama(cells["model"]), "seq": tokens, "batch": 1, "recompute": again}
    seconds = float(cells["FSDP iteration time (s)"])
    yield MeasuredStep(row, cells["model"], "A100", "a100-80", int(cells["gpu-count"]), seconds, words)


def fms(row: int, cells: Mapping[str, str]) -> Iterator[MeasuredStep]:
    """Yield the steps of a row of fms-fsdp's tables, of throughputs or of MFU, on both machines."""
    size = cells["Model Size"].lower()
    model = f"Llama 2 {size.upper()}"
    shape = llama(model)
    batch = int(cells.get("Batch Size") or cells["Batch size"])
    words: dict[str, Any] = {
        **shape,
        "seq": FMS_TOKENS,
        "batch": batch,
        "recompute": round(shape["layers"] * FMS_AGAIN.get(size, 0)),
    }
    words |= {"strategy": FMS_STRATEGY.get(size, "FULL_SHARD"), "compile": cells["Compile"] == "Y"}
    for gpu, (device, gpus, links) in FMS_MACHINES.items():
        name, figure = next((name, float(cell)) for name, cell in cells.items() if gpu in name and "HFU" not in name)
        peak = next(each.tflops["bf16"] for each in GPUS if each.name == device) * 1e12
        rate = figure * peak / flops_of_token(shape) if name.startswith("MFU") else figure
        yield MeasuredStep(row, model, gpu, device, gpus, batch * FMS_TOKENS / rate, words, links)


def llama(name: str) -> dict[str, int]:
    """Return the options of the program for a Llama."""
    return dict(zip("layers hidden heads kv inner vocab".split(), LLAMAS[name], strict=True))


def flops_of_token(shape: Mapping[str, int]) -> float:
    """Return what MFU counts of a token (nanoGPT's formula, to which fms-fsdp refers)."""
    layers, hidden, heads, kv, inner, vocab = (shape[name] for name in "layers hidden heads kv inner vocab".split())
    block = 2 * hidden * hidden * (1 + kv / heads) + 3 * hidden * inner
    return 6 * (layers * block + 2 * vocab * hidden) + 12 * layers * hidden * FMS_TOKENS


# By the repository that a row names. llm-foundry's table has columns of its own.
READERS: dict[str, Callable[[int, Mapping[str, str]], Iterator[MeasuredStep]]] = {
    "yandex/YaFSDP": yafsdp,
    "foundation-model-stack/fms-fsdp": fms,
}
COLUMNS = (
    "Model", "SeqLen (T)", "# GPUs", "GPU", "MicroBatchSize", "GradAccum", "GlobalBatchSize (T)", "Throughput (T/s)",
    "Precision", "Sharding Strategy", "Activation Checkpointing",
)  # fmt: skip


def steps_of(file: Path, rows: Sequence[int], refuse: Refuse) -> list[MeasuredStep]:
    """Return the steps of these rows of a table, all if no rows are named. Of llm-foundry's, every tenth."""
    lines = read_text(file, FILE_BYTES_MAX, refuse).splitlines()[1:]
    reader = READERS.get(lines[0].partition(",")[0] if lines else "", foundry)
    # The cells of a row are not quoted: name=value, with commas between.
    listed = [dict(cell.split("=", 1) for cell in line.split(",") if "=" in cell) for line in lines]
    table = read_rows(file, FILE_BYTES_MAX, refuse, COLUMNS) if reader is foundry else listed
    chosen = rows or range(0, len(table), EVERY if reader is foundry else 1)
    if wrong := [row for row in chosen if row >= len(table)]:
        raise refuse(f"it has no row {wrong[0]}")
    return [step for row in chosen for step in reader(row, table[row])]
