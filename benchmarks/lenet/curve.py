"""What commands use over time: processors and memory of their processes, and those of the first GPU if there is one.

    python -m benchmarks.lenet.curve --csv curve.csv --png curve.png --commands "gptscale lenet train --epochs 2" "..."

The commands run one after the other, and a picture shows them beside each other.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import pynvml

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_output_file, check_ranges
from gptscale.common.settings.command_line import parse
from gptscale.launchers.cli import start
from gptscale.results.render import DPI, subplots

PANELS = {
    "processors": "processors in use",
    "memory_gib": "memory, GiB",
    "gpu_percent": "GPU, %",
    "gpu_gib": "GPU memory, GiB",
}


@dataclass(frozen=True)
class CurveOptions:
    """Which commands, and where their curves go."""

    commands: tuple[str, ...]
    """One or more, each in quotes."""
    csv: Path
    """File for the samples."""
    png: Path
    """File for the picture."""
    every_s: float = 0.2
    """Seconds between two samples."""

    def __post_init__(self) -> None:
        check_ranges(self, {"every_s": (0.01, 60.0)})
        if not self.commands:
            raise ConfigError("no command", "in --commands", "write each in quotes")
        for command in self.commands:
            if not shutil.which(program := command.partition(" ")[0]):
                raise ConfigError(f"there is no program {program!r}", "in --commands", "write it as in a shell")
        for name in ("csv", "png"):
            check_output_file(getattr(self, name), f"--{name}", "cannot be written")


def samples(command: str, every_s: float) -> Iterator[dict[str, float | str]]:
    """Run a command, and yield what it uses every so many seconds until it ends. Raises ConfigError if it fails."""
    gpu = None
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    began = last = time.monotonic()
    with subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL) as process:
        root, spent = psutil.Process(process.pid), dict[int, float]()
        while process.poll() is None:
            time.sleep(every_s)
            before, resident = sum(spent.values()), 0
            with suppress(psutil.NoSuchProcess):
                for one in (root, *root.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        spent[one.pid] = sum(one.cpu_times()[:2])
                        resident += one.memory_full_info().pss
            now = time.monotonic()
            used = (sum(spent.values()) - before) / (now - last)
            row: dict[str, float | str] = {
                "command": command,
                "seconds": now - began,
                "processors": used,
                "memory_gib": resident / 2**30,
            }
            if gpu is not None:
                row["gpu_percent"] = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu
                row["gpu_gib"] = pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30
            last = now
            yield row
    if process.returncode:
        raise ConfigError(f"it ended with {process.returncode}", f"in {command}", "run it by itself")


def main(argv: Sequence[str]) -> int:
    """Run all commands, and write the samples and the picture."""
    options = parse(CurveOptions, argv, prog="python -m benchmarks.lenet.curve")
    frame = pd.DataFrame([row for command in options.commands for row in samples(command, options.every_s)])
    panels = [name for name in PANELS if name in frame]
    common = set.intersection(*({*command.split()} for command in options.commands))
    figure, axes = subplots(len(panels), 1, (8, 2.2 * len(panels)), sharex=True)
    for axis, name in zip(axes[:, 0], panels, strict=True):
        for command, rows in frame.groupby("command", sort=False):
            own = " ".join(word for word in str(command).split() if word not in common)
            axis.plot(rows.seconds, rows[name], linewidth=1, label=own or command)
        axis.set(ylabel=PANELS[name], ylim=(0, None))
    axes[0, 0].legend(fontsize=7, loc="lower right")
    axes[-1, 0].set_xlabel("seconds since the start")
    figure.savefig(options.png, dpi=DPI)
    frame.round(3).to_csv(options.csv, index=False)
    print(f"wrote {options.csv} and {options.png}")
    return 0


if __name__ == "__main__":
    sys.exit(start(main))
