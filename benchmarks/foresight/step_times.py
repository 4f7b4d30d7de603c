"""How far is the price of a recorded step off? Beside it stand the steps that others measured.

python -m benchmarks.foresight.step_times --table FILE [--rows 0,5,10] [--link ib-800] [--csv FILE]

FILE is one of the tables that step_tables.py reads, as a CSV: llm-foundry's throughputs, YaFSDP's seconds of FSDP, or fms-fsdp's
throughputs and MFU. Their models are trained by programs/fsdp_gpt.py, a program of the same shapes, under the mock of CUDA.
Errors are told from data sheets alone, and with the first row of each device as the one that was measured: it tells how fast the
device is, or where it is on several nodes how fast their links are. Rows that differ in the number of GPUs alone are told as
ratios too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.foresight.step_tables import MeasuredStep, steps_of
from benchmarks.measurement import collect, print_written, tell
from gptscale.common.errors import DataError, GptscaleError
from gptscale.common.settings.checks import check_output_file
from gptscale.common.settings.command_line import parse
from gptscale.foresight.mock_cuda.devices import device_named
from gptscale.foresight.plan.question import gpu_cluster
from gptscale.foresight.price.cost import Costs, costs_of
from gptscale.foresight.price.replay import replay
from gptscale.foresight.simulate.interpreters import torch_folder_of
from gptscale.foresight.simulate.program import ProgramTask, Simulation
from gptscale.foresight.simulate.simulation import kept_simulation
from gptscale.launchers.cli import start

if TYPE_CHECKING:
    import pandas as pd

PROGRAM = Path(__file__).parent / "programs" / "fsdp_gpt.py"
PER_NODE = 8
MEMORY = 200 * 2**30
STEPS, LIMIT_S = 3, 900


@dataclass(frozen=True)
class StepTimeOptions:
    """Which rows of the table to simulate."""

    table: Path
    """A table of llm-foundry, YaFSDP or fms-fsdp."""
    rows: str = ""
    """Numbers of rows with commas between. By default all, and of llm-foundry's every tenth."""
    link: str | None = None
    """What connects nodes, where the table does not say. By default what the device usually has."""
    csv: Path | None = None
    """A row for each that was compared."""

    def __post_init__(self) -> None:
        check_output_file(self.csv, "--csv", "cannot be written")


def main(argv: Sequence[str]) -> int:
    """Simulate rows of the table, print each beside its measure, and return 1 if one failed."""
    about = "The price of recorded steps beside steps that others measured."
    options = parse(StepTimeOptions, argv, prog="python -m benchmarks.foresight.step_times", about=about)

    def refuse(reason: str) -> DataError:
        return DataError(f"{options.table} is no table that is known ({reason})", "in --table", "give one of its CSVs")

    steps = steps_of(options.table, [int(word) for word in options.rows.split(",") if word], refuse)
    learnt: dict[str, dict[str, Scaled | None]] = {}
    failed = list[MeasuredStep]()

    def compared() -> Iterator[dict[str, Any]]:
        for step in steps:
            try:
                yield errors_of(step, options.link, learnt.setdefault(step.gpu, {}))
            except GptscaleError as error:
                failed.append(step)
                tell(f"row {step.row}: {error}")

    frame = collect(compared(), options.csv)
    print_written(options.csv)
    if not frame.empty:
        first = frame.drop_duplicates("gpu").index
        for name, rows in {"data_sheet": frame, **dict.fromkeys(SCALES, frame.drop(first))}.items():
            if len(off := rows[name].dropna().abs()):
                print(f"{name}: {len(off)} rows, median {off.median():.1%}, worst {off.max():.1%}")
        print_ratios(frame)
    return int(bool(failed) or frame.empty)


def faster_device(costs: Costs, times: float) -> Costs:
    """Return the costs of a device so many times as fast."""
    return replace(costs, speed=times)


def faster_links(costs: Costs, times: float) -> Costs:
    """Return the costs with links between nodes so many times as fast."""
    return replace(costs, reached=replace(costs.reached, outside=costs.reached.outside * times))


# The things that a measured row may tell.
Scaled = Callable[[Costs], Costs]
SCALES = {"speed_of_one_row": faster_device, "links_of_one_row": faster_links}


def errors_of(step: MeasuredStep, link: str | None, learnt: dict[str, Scaled | None]) -> dict[str, Any]:
    """Return a step with the errors of its price. learnt: what the first row of its device told, which is filled in."""
    simulation = simulated(step)
    links = gpu_cluster(step.device, 2, PER_NODE, step.links or link).links
    costs = costs_of(step.device, PER_NODE, links, torch=step.torch)
    costs = replace(costs, gpu=replace(costs.gpu, memory=step.memory or costs.gpu.memory))
    if not learnt:
        learnt |= {name: scaled_to(step.seconds, simulation, costs, scale) for name, scale in SCALES.items()}
    priced = seconds(simulation, costs)
    errors = {"data_sheet": priced / step.seconds - 1}
    for name, scaled in learnt.items():
        errors[name] = seconds(simulation, scaled(costs)) / step.seconds - 1 if scaled else math.nan
    words = " ".join(f"{name}={value}" for name, value in step.words.items())
    told = ", ".join(f"{name} {error:+.1%}" for name, error in errors.items())
    tell(f"row {step.row}: {step.model} on {step.gpus} {step.device} ({words}): measured {step.seconds:.3f} s, {told}")
    known = {"row": step.row, "model": step.model, "gpu": step.gpu, "gpus": step.gpus, "links": links[1]}
    return {**known, "program": words, "measured_s": step.seconds, "priced_s": priced, **errors}


def scaled_to(
    measured: float, simulation: Simulation, costs: Costs, scale: Callable[[Costs, float], Costs]
) -> Scaled | None:
    """Return the scaling with which a step takes as long as was measured, None if no such scaling makes it."""
    low, high = 0.1, 10.0
    if not seconds(simulation, scale(costs, high)) < measured < seconds(simulation, scale(costs, low)):
        return None
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(simulation, scale(costs, middle)) > measured else (low, middle)
    return lambda others: scale(others, low)


def print_ratios(frame: pd.DataFrame) -> None:
    """Print how much longer a step takes on more GPUs, of rows that are alike otherwise."""
    for _, rows in frame.sort_values("gpus").groupby(["gpu", "program"]):
        few = rows.iloc[0]
        for _, row in rows[rows.gpus > few.gpus].iterrows():
            measured, priced = row.measured_s / few.measured_s, row.priced_s / few.priced_s
            print(
                f"{few.model} on {few.gpus} to {row.gpus} {row.gpu}: {measured:.3f} times as long, by its price {priced:.3f} "
                f"({priced / measured - 1:+.1%})"
            )


def simulated(step: MeasuredStep) -> Simulation:
    """Return the first rank of a step's world, which trains its model. It is kept for whoever asks again."""
    flags = [f"--{name}" for name, value in step.words.items() if value is True]
    words = [f"--{name}={value}" for name, value in step.words.items() if not isinstance(value, bool)]
    command = [sys.executable, str(PROGRAM), *words, *flags]
    # Whether it fits is not asked here.
    device = replace(device_named(step.device), memory=MEMORY)
    task = ProgramTask(command, step.gpus, "0", device, PER_NODE, STEPS, LIMIT_S, torch_folder=torch_folder_of(""))
    return kept_simulation(task, PROGRAM.read_text())


def seconds(simulation: Simulation, costs: Costs) -> float:
    """Return the seconds of a step at these costs, with a host that is always ahead: this machine's may be busy."""
    assert simulation.recorded is not None
    return replay({0: simulation.recorded}, costs, {0: 0.0})[0].step_s


if __name__ == "__main__":
    sys.exit(start(main))
