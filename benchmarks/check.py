"""The goals for the speed of this package, measured anew on this machine, each reached or not: `make bench-check`.

Ratios travel between machines, seconds do not: those of MNIST are goals for two cores.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.model.floors import Floor, check_floors
from benchmarks.quiet import QuietOptions
from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.common.settings.command_line import parse
from gptscale.launchers.cli import start

if TYPE_CHECKING:
    import pandas as pd

CONTENDERS = "single,single_gelu,handout,minimal_compiled"
# PyTorch's time over ours, of each operator the median over its cases of more than 64 KiB, forward and backward, fp32 and bf16.
OPERATORS = {"gelu": 1.0, "bias_gelu": 1.3, "max_pool2d": 1.0, "conv_bias_relu": 1.0}
LENET = ("gptscale.launchers.cli", "lenet")
# Images per second of the fast loader over those of a plain script. 25 s over the seconds to 99 %. The accuracy of `best`.
MNIST = {"mnist_fast_loader_over_plain": 3.0, "mnist_25_s_over_time_to_99": 1.0, "mnist_accuracy_of_best": 0.994}


@dataclass(frozen=True)
class CheckOptions(QuietOptions):
    """What to check. A quiet machine needs about five minutes for the step, three for the operators, four for MNIST."""

    floors: Path | None = None
    """CSV of the training step's ratios (name,floor), for benchmarks.model. Without it the step is left out."""
    mnist: Path | None = None
    """Folder with MNIST's four files. Without it MNIST is left out."""
    operators: bool = True
    """Check the operators."""

    def __post_init__(self) -> None:
        for path, option in ((self.floors, "--floors"), (self.mnist, "--mnist")):
            if path is not None and not path.exists():
                raise ConfigError(f"{path} is not there", f"in {option}", "give another, or leave it out")


def main(argv: Sequence[str]) -> int:
    """Measure what the options name, say of each ratio whether it reaches its goal, and return 1 if one does not."""
    options = parse(CheckOptions, argv, prog="python -m benchmarks.check", about="The goals of speed, measured anew.")
    busy = ["--allow-busy"] if options.allow_busy else []
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        if options.floors:
            words = f"--device cpu --contenders {CONTENDERS} --rounds 2 --floors".split()
            status |= run("benchmarks.model", *words, str(options.floors), *busy)
        ratios: dict[str, float] = {}
        if options.operators:
            ratios |= operator_ratios(Path(folder), busy)
        if options.mnist:
            ratios |= mnist_ratios(Path(folder), options.mnist)
    goals = (OPERATORS if options.operators else {}) | (MNIST if options.mnist else {})
    return status | check_floors(ratios, [Floor(name, least) for name, least in goals.items()])


def run(*words: str) -> int:
    """Run a module in a process of its own, whose output goes where this one's goes, and return its status."""
    return subprocess.run([sys.executable, "-m", *words], check=False).returncode


def measured(csv: Path, *words: str) -> pd.DataFrame:
    """Return the rows that a command writes to `csv`, or raise GptscaleError if it fails."""
    import pandas as pd

    if run(*words, "--csv", str(csv)):
        raise GptscaleError(f"{' '.join(words[:3])} failed", "in benchmarks.check", "see its own message above")
    return pd.read_csv(csv)


def operator_ratios(folder: Path, busy: Sequence[str]) -> dict[str, float]:
    """Return the median ratio of each operator to PyTorch's own."""
    rows = measured(folder / "ops.csv", "benchmarks.ops", "--largest-kib", "16384", "--rounds", "4", *busy)
    medians = rows[rows.size_kib > 64].groupby("operator").ratio_to_torch.median()
    return {str(name): float(ratio) for name, ratio in medians.items()}


def mnist_ratios(folder: Path, mnist: Path) -> dict[str, float]:
    """Return the three ratios of MNIST, of three seeds each the median."""
    data = ["--data", str(mnist)]
    plain = measured(folder / "bench.csv", "benchmarks.lenet", *data, "--rounds", "1").set_index("contender")
    rows = {
        preset: measured(
            folder / f"{preset}.csv", *LENET, "baseline", *data, "--preset", preset, "--out", str(folder / preset)
        )
        for preset in ("fast", "best")
    }
    ratios = (
        plain.ratio_to_0_workers["fast loader"],
        25.0 / rows["fast"].seconds_to_99.fillna(math.inf).median(),
        rows["best"].test_accuracy.median(),
    )
    return dict(zip(MNIST, map(float, ratios), strict=True))


if __name__ == "__main__":
    sys.exit(start(main))
