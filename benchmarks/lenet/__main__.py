"""`python -m benchmarks.lenet`: images/s of the fast loader beside a plain PyTorch script of the same model.

The contenders run in turn, each in a process of its own with the same number of threads, and their medians over rounds are
compared. The time is the wall time of whole training epochs with loading and augmentation, without tests and imports.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.task import run_worker
from gptscale.common.settings.checks import OptionNeed, check_output_file, check_ranges
from gptscale.common.settings.command_line import parse
from gptscale.launchers.cli import start
from gptscale.lenet.comparison.tables import ROWS, show, with_references
from gptscale.lenet.run.config import TORCHVISION_NEED, VisionConfig
from gptscale.results import render

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LenetBenchOptions:
    """The images and the length of the bench, in which all contenders have RandomAffine and Adam."""

    data: str = "digits"
    """digits | mnist | a folder of idx files."""
    data_dir: Path = Path("data")
    """Where torchvision keeps mnist."""
    download: bool = False
    """Download mnist to --data-dir if it is not there."""
    epochs: int = 1
    """Of each contender in each round; accuracy is that after the last."""
    rounds: int = 3
    """Turns of each contender."""
    threads: int = 2
    """CPU threads of each contender's process (and as many worker processes as its name says)."""
    csv: Path | None = None
    """File for the figures."""
    md: Path | None = None
    """File for the table in Markdown."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (TORCHVISION_NEED,)

    def __post_init__(self) -> None:
        check_ranges(self, {"epochs": (1, 1000), "rounds": (1, 100), "threads": (1, 1024)})
        for name in ("csv", "md"):
            check_output_file(getattr(self, name), f"--{name}", "cannot be written")


# By name: batch size, learning rate, schedule, and the plain script's worker processes or None for this package's run.
CONTENDERS: dict[str, tuple[int, float, str, int | None]] = {
    "plain, 0 workers": (32, 1e-3, "constant", 0),
    "plain, 2 workers": (32, 1e-3, "constant", 2),
    "fast loader": (32, 1e-3, "constant", None),
    "fast loader, batch 128": (128, 8e-3, "onecycle", None),
}


@dataclass
class LenetContender:
    """One contender over all rounds, with the images/s of each epoch and the accuracy of each round."""

    name: str
    images_per_s: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Measure all contenders, print the table, write the file."""
    options = parse(LenetBenchOptions, argv, prog="python -m benchmarks.lenet", about="Beside a plain PyTorch script.")
    # It imports torch, so not before the options are read.
    from gptscale.lenet.run.preflight import ready_run, world_from_environment

    config = VisionConfig(data=options.data, data_dir=options.data_dir, download=options.download, device="cpu")
    # A mistake in the data is one line of this process, before any contender starts.
    ready_run(config, world_from_environment(config))
    contenders = [LenetContender(name) for name in CONTENDERS]
    for turn in range(options.rounds):
        for contender in contenders:
            print(f"round {turn + 1} of {options.rounds}: {contender.name}", file=sys.stderr, flush=True)
            result = run_contender(contender.name, options, seed=turn + 1)
            contender.images_per_s += [result["n_images"] / seconds for seconds in result["epoch_times_s"]]
            contender.accuracies.append(result["accuracy"])
    frame = figures(contenders, options)
    lines = table(frame)
    note = f"{frame.device[0]}, torch {frame.torch_version[0]}, {options.threads} threads, {options.epochs} epochs, "
    note += f"{options.rounds} rounds"
    show(lines)
    print(note)
    if options.csv:
        frame.to_csv(options.csv, index=False)
    if options.md:
        options.md.write_text(render.markdown(lines, left=["contender"], notes=[note]))
    for path in (options.csv, options.md):
        if path:
            print(f"wrote {path}")
    return 0


def run_contender(name: str, options: LenetBenchOptions, seed: int) -> dict[str, Any]:
    """Run one contender once in a process of its own and return its result."""
    batch_size, lr, schedule, workers = CONTENDERS[name]
    task = {
        "contender": name,
        "data": options.data,
        "data_dir": str(options.data_dir.absolute()),
        "epochs": options.epochs,
        "lr": lr,
        "threads": options.threads,
        "seed": seed,
        "batch_size": batch_size,
    }
    if workers is None:
        task |= {"lr_schedule": schedule, "operators": "custom", "channels_last": False}
    else:
        task |= {"num_workers": workers}
    return run_worker("benchmarks.lenet.fast" if workers is None else "benchmarks.lenet.plain", task)


def figures(contenders: Sequence[LenetContender], options: LenetBenchOptions) -> pd.DataFrame:
    """Return a row for each contender, with the ratios of its median images/s to those of the two plain scripts."""
    import pandas as pd
    import torch

    from gptscale.common.measure.devices import device_name

    medians = {m.name: statistics.median(m.images_per_s) for m in contenders}
    rows = []
    for m in contenders:
        batch_size, lr, schedule, _ = CONTENDERS[m.name]
        rows.append(
            {
                "contender": m.name,
                "batch_size": batch_size,
                "lr": lr,
                "lr_schedule": schedule,
                "images_per_s": medians[m.name],
                "images_per_s_min": min(m.images_per_s),
                "images_per_s_max": max(m.images_per_s),
                "ratio_to_0_workers": medians[m.name] / medians["plain, 0 workers"],
                "ratio_to_2_workers": medians[m.name] / medians["plain, 2 workers"],
                "accuracy_median": statistics.median(m.accuracies),
                "accuracy_min": min(m.accuracies),
                "accuracy_max": max(m.accuracies),
                "epochs": options.epochs,
                "rounds": options.rounds,
                "threads": options.threads,
                "data": options.data if options.data in ("digits", "mnist") else Path(options.data).name,
                "device": device_name(torch.device("cpu")),
                "torch_version": torch.__version__,
            }
        )
    return pd.DataFrame(rows)


def table(frame: pd.DataFrame) -> list[dict[str, str]]:
    """Return a line for each contender, then those of report B, from its seconds of 10 epochs with tests."""
    lines = []
    row: Any
    for row in frame.itertuples():
        line = {"contender": row.contender, "batch": str(row.batch_size)}
        line["images/s"] = f"{row.images_per_s:,.0f} ({row.images_per_s_min:,.0f}-{row.images_per_s_max:,.0f})"
        line |= {f"to {n} workers": f"{getattr(row, f'ratio_to_{n}_workers'):.2f}" for n in (0, 2)}
        line["accuracy %"] = f"{row.accuracy_median:.2%} ({row.accuracy_min:.2%}-{row.accuracy_max:.2%})".replace(
            "%", ""
        )
        lines.append(line)
    reports = [row for row in ROWS["workers"] if "training s" in row]
    total_s = {int(row["run"].split()[-2]): float(row["training s"]) for row in reports}
    references = []
    for row, seconds in zip(reports, total_s.values(), strict=True):
        reference = {"contender": f"{row['run']}, H100", "batch": "32", "images/s": f"{600_000 / seconds:,.0f}"}
        reference |= {f"to {k} workers": f"{total_s[k] / seconds:.2f}" for k in (0, 2)}
        references.append(reference | {"accuracy %": row["accuracy %"]})
    return with_references(lines, references)


if __name__ == "__main__":
    sys.exit(start(main))
