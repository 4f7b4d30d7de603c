"""The command `gptscale bench saves`: what a save costs a run that waits for it, and one that does not.

One process trains the same steps again and again: without a save, with one, and with one behind the steps, in an order that
changes, so that a drifting machine weighs on all three alike.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_output_file, check_ranges
from gptscale.common.settings.command_line import parse
from gptscale.launchers.bench.measurement import collect, print_written, tell
from gptscale.launchers.bench.quiet import QuietOptions, quiet_machine
from gptscale.results import render

if TYPE_CHECKING:
    from gptscale.common.engine import Engine

WAYS = ("none", "waits", "behind")
# The steps of a turn last this much longer than a save that waits, so that the save behind them ends before they do.
LONGER = 2.5
STEPS_LEAST = 4


@dataclass(frozen=True)
class SavesOptions(QuietOptions):
    """Which model, where to, how often."""

    model: str = "gpt2"
    """Preset."""
    n_layer: int = 9
    """Layers. The default makes 102 million parameters of gpt2."""
    seq_len: int = 64
    """Tokens of a step, which is one sequence."""
    rounds: int = 5
    """Turns of each way, after one that is not counted."""
    out: Path = Path(".")
    """The disk to write to. What is written is deleted again."""
    csv: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        check_ranges(self, {"rounds": (1, 1000)})
        check_output_file(self.csv, "--csv", "cannot be written")
        if not self.out.is_dir():
            raise ConfigError(f"{self.out} is no folder", "in --out", "name a folder that exists")


def main(argv: Sequence[str]) -> int:
    """Measure, print, write, and return 0."""
    about = "The time that a save costs a run, with and without --save-async."
    options = parse(SavesOptions, argv, prog="gptscale bench saves", about=about)
    with quiet_machine(options, "bench saves"):
        show([dict(row) for row in collect(measure(options), options.csv).to_dict("records")])
        print_written(options.csv)
    return 0


def measure(options: SavesOptions) -> Iterator[dict[str, Any]]:
    """Train, and yield a row for each turn: the seconds of its steps, and those before its first step."""
    import torch

    from gptscale.common.process.begin import keep_freed_memory
    from gptscale.common.process.world import World
    from gptscale.launchers.run.options import parse_run
    from gptscale.launchers.run.preflight import preflight
    from gptscale.recipes import get

    keep_freed_memory()
    folder = Path(tempfile.mkdtemp(prefix=".bench-saves-", dir=options.out))
    words = f"--model {options.model} --n-layer {options.n_layer} --seq-len {options.seq_len} --global-batch-size 1"
    try:
        config, recipe_config = parse_run("single", [*words.split(), "--data", "synthetic", "--out", str(folder)])
        plan = preflight("single", config, recipe_config, World.from_environment(config.device))
        engine: Engine = get("single").load().build(plan.run, recipe_config)
        turns = Turns(engine, plan.batches(plan.train, 0, 1).batch(0).to(plan.run.world.device), folder)
        shared = {
            "n_params": plan.run.gpt.n_params,
            "state_gib": sum(shard.tensor.nbytes for shard in engine.state()) / 2**30,
            "threads": torch.get_num_threads(),
            "torch_version": torch.__version__,
        }
        for i in range(options.rounds + 1):
            tell(f"round {i} of {options.rounds} ...")
            for way in WAYS[i % 3 :] + WAYS[: i % 3]:
                figures = turns.take(way)
                # The first turn of each warms up.
                if i:
                    yield {"round": i, "way": way, **figures, **shared}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Turns:
    """Steps of an engine, with a save before the first of them or without."""

    def __init__(self, engine: Engine, batch: Any, folder: Path) -> None:
        from gptscale.common.checkpoint.background import BackgroundSave
        from gptscale.common.checkpoint.writer import save

        self.engine, self.batch, self.folder, self.background = engine, batch, folder, BackgroundSave()
        self._save = save
        self._step()
        began = time.perf_counter()
        self._step()
        step_s = time.perf_counter() - began
        self.peak_before_gib = _peak_gib()
        began = time.perf_counter()
        save(engine, folder, 1, {})
        save_s = time.perf_counter() - began
        self.n_steps = max(STEPS_LEAST, math.ceil(LONGER * save_s / step_s))

    def _step(self) -> None:
        self.engine.train_step(self.batch, 1e-4).loss.item()

    def take(self, way: str) -> dict[str, float]:
        """Take all steps in one of the WAYS, and return the seconds and the memory."""
        _forget_peak()
        began, processor = time.perf_counter(), time.process_time()
        if way == "waits":
            self._save(self.engine, self.folder, 2, {})
        if way == "behind":
            self.background.begin(self.engine, self.folder, 2, {}, keep=2)
        held_s = time.perf_counter() - began
        for _ in range(self.n_steps):
            self._step()
        late_s = 0.0
        if way == "behind":
            steps_ended = time.perf_counter()
            self.background.finish()
            late_s = time.perf_counter() - steps_ended
        return {
            "held_s": held_s,
            "late_s": late_s,
            "total_s": time.perf_counter() - began,
            "processor_s": time.process_time() - processor,
            "steps": self.n_steps,
            "peak_gib": _peak_gib(),
            "peak_before_gib": self.peak_before_gib,
        }


def _forget_peak() -> None:
    """Let the kernel count the peak of the resident set anew (Linux alone)."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def _peak_gib() -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        return math.nan
    (peak,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak) / 2**20


def show(rows: Sequence[dict[Any, Any]]) -> None:
    """Print what each way loses beside the turn of the same round that saves nothing."""

    def median(way: str, value: str) -> float:
        return float(statistics.median(row[value] for row in rows if row["way"] == way))

    none = {row["round"]: row for row in rows if row["way"] == "none"}

    def more(way: str, value: str) -> list[float]:
        return [row[value] - none[row["round"]][value] for row in rows if row["way"] == way]

    table = render.table(["save", "steps wait s", "run longer by s", "least to most", "processor s", "peak GiB"])
    for way in WAYS[1:]:
        seconds = more(way, "total_s")
        cells = (median(way, "held_s"), statistics.median(seconds))
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        others = (statistics.median(more(way, "processor_s")), median(way, "peak_gib"))
        table.add_row(way, *(f"{x:.2f}" for x in cells), spread, *(f"{x:.2f}" for x in others))
    render.console(100).print(table)
    lost = {way: statistics.median(more(way, "total_s")) for way in WAYS[1:]}
    row = rows[0]
    print(
        f"behind: steps wait {median('behind', 'held_s') / median('waits', 'held_s'):.0%} and the run is longer by "
        f"{lost['behind'] / lost['waits']:.0%} of what a save that waits costs; {row['n_params'] / 1e6:.0f} million parameters, "
        f"{row['state_gib']:.2f} GiB of state, {row['steps']} steps of {median('none', 'total_s') / row['steps']:.3f} s, "
        f"peak before any save {row['peak_before_gib']:.2f} GiB, {row['threads']} threads, torch {row['torch_version']}"
    )
