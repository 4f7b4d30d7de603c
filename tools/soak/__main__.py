"""Break runs at random, let them go on, and prove that nothing is lost: `python -m tools.soak`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gptscale.common.errors import ConfigError
from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.common.settings.checks import check_ranges, parse_names
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.cli import start
from tools.soak.disk import own_mounts, small_disk


@dataclass(frozen=True)
class SoakOptions:
    """What to break, and for how long."""

    minutes: float = 30.0
    """No run begins after this many minutes."""
    recipes: str = "all"
    """Names with commas between, or all that can run on this machine's CPU."""
    faults: str = "all"
    """Kinds with commas between, or all. The table at the end has their names."""
    runs: int | None = None
    """Runs to break of each recipe. Default: as many as there is time for."""
    nproc: int = 2
    """Processes for each recipe that splits its batch."""
    seed: int = 1234
    """Fixes which faults strike, and when: the same ones in every run with the same number."""
    out: Path | None = None
    """A new folder for soak.csv and the runs. Default: a temporary one, which stays only if something went wrong."""

    def __post_init__(self) -> None:
        check_ranges(self, {"minutes": (0.01, 10**5), "runs": (1, 10**6), "nproc": (2, 64), "seed": (0, 2**31 - 1)})
        if self.out is not None and self.out.exists():
            raise ConfigError(f"{self.out} exists already", "in --out", "name a new folder")


def main(argv: Sequence[str]) -> int:
    """Break runs until the time is over, print the table, and return 0 if nothing was lost and every end was as promised."""
    options = parse(
        SoakOptions, argv, prog="python -m tools.soak", about="Break runs at random and prove that nothing is lost."
    )
    # First of all, because only processes that are started later see the disk that is mounted then.
    may_mount = own_mounts()
    begin_warm_parent("cpu", imports=[])
    # After the options are parsed, because these import torch.
    from gptscale.launchers.run.start import nproc_of, recipes_named
    from tools.soak import report
    from tools.soak.broken_run import Outcome
    from tools.soak.faults import FAULTS
    from tools.soak.rounds import soak
    from tools.soak.work import SoakWork

    on_cpu = RunConfig(device="cpu")
    names = list(FAULTS) if options.faults == "all" else parse_names(options.faults, FAULTS, "fault", "--faults")
    recipes = recipes_named(options.recipes, on_cpu)
    works = [SoakWork(recipe, nproc_of(recipe, on_cpu, options.nproc), options.seed) for recipe in recipes]
    for work in works:
        work.check(options.out or Path(tempfile.gettempdir()))
    out = options.out or Path(tempfile.mkdtemp(prefix="gptscale-soak-"))
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    # The table is printed, and the disk unmounted, also after Ctrl-C and SIGTERM.
    with ExitStack() as stack:
        stack.callback(report.show, outcomes)
        disk = stack.enter_context(small_disk(out / "disk")) if may_mount else None
        if disk is None:
            print("no disk can be mounted here: a limit on the size of files stands for a full one", file=sys.stderr)
        faults = [FAULTS[name] for name in names]
        for ended in soak(works, faults, out, disk, n_runs=options.runs, limit_s=60.0 * options.minutes):
            outcomes += ended
            print(*map(report.line, ended), sep="\n", flush=True)
            report.append(ended, out / "soak.csv")
    if not report.as_promised(outcomes):
        print(f"the runs that went wrong, with the logs of their starts: {out}")
        return 1
    if options.out is None:
        shutil.rmtree(out)
    return 0


if __name__ == "__main__":
    sys.exit(start(main))
