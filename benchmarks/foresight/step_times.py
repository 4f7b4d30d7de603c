"""How far is the price of a recorded step off? Beside it stand the steps that others measured.

python -m benchmarks.foresight.step_times --table FILE [--rows 0,5,10] [--csv FILE]

FILE is llm-foundry's table of throughputs (scripts/train/benchmarking of mosaicml/llm-foundry, as a CSV). Its models are trained
by programs/fsdp_gpt.py, a program of the same shapes, under the mock of CUDA. Errors are told twice: from data sheets alone, and
with the first row of each device as the one that was measured.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measurement import print_written, write_csv
from gptscale.common.errors import DataError, GptscaleError
from gptscale.common.measure.gpus import GPUS
from gptscale.common.settings.checks import check_output_file
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.user_file import read_rows
from gptscale.foresight.price.cost import Costs, costs_of
from gptscale.foresight.price.replay import replay
from gptscale.foresight.simulate.own_program import ProgramOptions
from gptscale.foresight.simulate.program import Simulation
from gptscale.launchers.cli import start

# Layers, hidden size and heads by the table's names.
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
PROGRAM = Path(__file__).parent / "programs" / "fsdp_gpt.py"
FILE_BYTES_MAX = 2**26
FLOAT8 = "amp_fp8"
# The torch that the table's programs had, of 2023. Ours is newer, and so are its kernels of attention.
OF_THEIR_DAY = "2.0"
# Both A100 are one chip with another memory.
DEVICES = {"h100_80gb": "h100-80", "a100_80gb": "a100-80", "a100_40gb": "a100-80"}
MEMORY = {"a100_40gb": next(gpu.memory for gpu in GPUS if gpu.name == "a100-40")}
COLUMNS = (
    "Model",
    "SeqLen (T)",
    "# GPUs",
    "GPU",
    "MicroBatchSize",
    "GradAccum",
    "GlobalBatchSize (T)",
    "Throughput (T/s)",
    "Precision",
)
# More micro-batches take as long as these, and their simulation takes longer.
MICRO_BATCHES = 2
# Whether it fits is not asked here.
MEMORY_GIB = 200.0


@dataclass(frozen=True)
class StepTimeOptions:
    """Which rows of the table to simulate."""

    table: Path
    """llm-foundry's table."""
    rows: str = ""
    """Numbers of rows with commas between. By default every tenth."""
    csv: Path | None = None
    """A row for each that was compared."""

    def __post_init__(self) -> None:
        check_output_file(self.csv, "--csv", "cannot be written")


def main(argv: Sequence[str]) -> int:
    """Simulate rows of the table, print each beside its measure, and return 1 if one failed."""
    about = "The price of recorded steps beside steps that others measured."
    options = parse(StepTimeOptions, argv, prog="python -m benchmarks.foresight.step_times", about=about)

    def refuse(reason: str) -> DataError:
        return DataError(f"{options.table} is not llm-foundry's table ({reason})", "in --table", "give its CSV")

    table = list(read_rows(options.table, FILE_BYTES_MAX, refuse, COLUMNS))
    chosen = [int(word) for word in options.rows.split(",")] if options.rows else range(0, len(table), 10)
    told: list[dict[str, Any]] = []
    scales: dict[str, float] = {}
    failed = 0
    for number in chosen:
        row, device = table[number], DEVICES[table[number]["GPU"]]
        if row["Precision"] == FLOAT8:
            print(f"row {number}: left out, since it is in float8 and the program is not", flush=True)
            continue
        micro_batches = min(MICRO_BATCHES, int(row["GradAccum"]))
        measured = (
            int(row["GlobalBatchSize (T)"]) / float(row["Throughput (T/s)"]) * micro_batches / int(row["GradAccum"])
        )
        try:
            simulation = simulated(row, device, micro_batches)
        except GptscaleError as error:
            failed += 1
            print(f"row {number}: {error}", flush=True)
            continue
        costs = costs_of(device, torch=OF_THEIR_DAY)
        costs = replace(costs, gpu=replace(costs.gpu, memory=MEMORY.get(row["GPU"], costs.gpu.memory)))
        priced = seconds(simulation, costs)
        if row["GPU"] not in scales:
            scales[row["GPU"]] = speed_of(simulation, costs, measured)
        scaled = seconds(simulation, replace(costs, speed=scales[row["GPU"]]))
        told.append(
            {
                "row": number,
                **{name: row[name] for name in COLUMNS[:6]},
                "measured_s": measured,
                "data_sheet": priced / measured - 1,
                "one_row_measured": scaled / measured - 1,
            }
        )
        print(
            f"row {number}: {row['Model']} of {row['SeqLen (T)']} on {row['# GPUs']} {device}: measured {measured:.3f} s, "
            f"data sheet {priced / measured - 1:+.1%}, with the first row measured {scaled / measured - 1:+.1%}",
            flush=True,
        )
    import pandas as pd

    write_csv(pd.DataFrame(told), options.csv)
    print_written(options.csv)
    first = {row["GPU"]: row["row"] for row in reversed(told)}
    for name, rows in (("data_sheet", told), ("one_row_measured", [r for r in told if r["row"] not in first.values()])):
        off = [abs(row[name]) for row in rows]
        if off:
            print(f"{name}: {len(off)} rows, median {statistics.median(off):.1%}, worst {max(off):.1%}")
    return int(failed > 0)


def simulated(row: Mapping[str, str], device: str, micro_batches: int) -> Simulation:
    """Return the first rank of a row's world, which trains the row's model."""
    layers, hidden, heads = MODELS[row["Model"]]
    words = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "seq": row["SeqLen (T)"],
        "batch": row["MicroBatchSize"],
    }
    words |= {"accumulate": micro_batches, "strategy": row["Sharding Strategy"]}
    command = [sys.executable, str(PROGRAM), *(f"--{name}={value}" for name, value in words.items())]
    command += ["--recompute"] if row["Activation Checkpointing"] == "True" else []
    return ProgramOptions(world=int(row["# GPUs"]), device_kind=device, memory_gib=MEMORY_GIB).simulate(command, "0")


def seconds(simulation: Simulation, costs: Costs) -> float:
    """Return the seconds of a step at these costs."""
    assert simulation.recorded is not None
    return replay({0: simulation.recorded}, costs, {0: simulation.host_s})[0].step_s


def speed_of(simulation: Simulation, costs: Costs, measured: float) -> float:
    """Return by how much a device is faster than what its data sheet promises, if a step takes as long as was measured."""
    low, high = 0.1, 10.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(simulation, replace(costs, speed=middle)) > measured else (low, middle)
    return low


if __name__ == "__main__":
    sys.exit(start(main))
