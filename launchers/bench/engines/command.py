"""`gptscale bench engines`: what our layer adds to each engine, step for step against the engine's own minimal loop.

Both run in the same processes on the same model and batch, in turn, a block of steps each, so that a drifting machine weighs on
both alike. Ours is all that a run does: tokens read ahead, engine, CSV, console; the other reads its loss and no more.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from gptscale.common.data.loader import Prefetcher
from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import device_name
from gptscale.common.measure.speed import synchronize
from gptscale.common.model.build import materialise, meta_gpt
from gptscale.common.model.gpt import Block
from gptscale.common.process.begin import keep_freed_memory
from gptscale.common.process.ranks import launch
from gptscale.common.process.world import World, process_group
from gptscale.common.settings.command_line import parse
from gptscale.common.train import train
from gptscale.launchers.bench.engines.minimal_loops import SETUPS
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight, why_not_here
from gptscale.recipes import get
from gptscale.results.record.recorder import Recorder

BLOCK_STEPS = 4
SPLITS = {"hybrid_3d": ["--tp-size", "2"]}  # as its minimal loop does; with --nproc 4 there are data ranks too


@dataclass(frozen=True)
class EnginesOptions:
    """Which engines, how long."""

    recipes: str = "all"
    """Names with commas between, or all that can run here and have a minimal loop to compare with."""
    nproc: int = 2
    """Processes."""
    rounds: int = 12
    """Blocks of 4 steps for each of the two, after one that is not counted."""
    model: str = "tiny"
    """Preset."""
    n_embd: int = 256
    """Hidden size; on a CPU wide enough for a step to last long beside the noise."""
    csv: Path | None = None
    """File for the figures."""


def main(argv: Sequence[str]) -> int:
    """Measure each engine in a world of its own; table, CSV."""
    options = parse(
        EnginesOptions, argv, prog="gptscale bench engines", about="Our layer against each engine's own loop."
    )
    names = [n for n in SETUPS if not why_not_here(n)] if options.recipes == "all" else options.recipes.split(",")
    if unknown := [name for name in names if name not in SETUPS]:
        raise ConfigError(f"{unknown[0]} has no minimal loop", "in --recipes", "use one of: " + " ".join(SETUPS))
    rows = []
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            task = json.dumps([name, options.rounds, options.model, options.n_embd, folder])
            if launch([sys.executable, "-m", "gptscale.launchers.bench.engines.command", task], options.nproc):
                raise ConfigError(f"{name} failed", "in bench engines", "see its own message above")
            rows.append({"recipe": name, **json.loads((Path(folder) / "found.json").read_text())})
    frame = pd.DataFrame(rows)
    show(frame)
    if options.csv:
        frame.to_csv(options.csv, index=False)
        print(f"wrote {options.csv}")
    return 0


def show(frame: pd.DataFrame) -> None:
    """The table."""
    table = Table("recipe", "its own loop ms", "ours ms", "ratio", "ratio p10-p90", box=None, pad_edge=False)
    for row in frame.to_dict("records"):
        spread = f"{row['ratio_p10']:.3f}-{row['ratio_p90']:.3f}"
        times = (f"{row[k] * 1e3:,.1f}" for k in ("bare_step_s", "our_step_s"))
        table.add_row(str(row["recipe"]), *times, f"{row['ratio']:.3f}", spread)
    Console(width=100).print(table)
    print(f"{frame.device[0]}, torch {torch.__version__}; ratio: median over pairs of blocks run in turn")


def compare(name: str, rounds: int, model: str, n_embd: int, folder: Path) -> dict[str, object]:
    """One rank's part: both engines built, then blocks in turn; seconds per step and the ratio of each pair."""
    words = ["--model", model, "--n-embd", str(n_embd), "--data", "synthetic", "--out", str(folder), "--lr", "1e-3"]
    words += SPLITS.get(name, [])
    steps = BLOCK_STEPS * (rounds + 1)
    recipe = get(name)
    config, recipe_config = parse_run(
        name, [*words, "--steps", str(steps), "--lr-schedule", "constant", "--no-tensorboard"]
    )
    plan = preflight(name, config, recipe_config, World.from_environment(config.device, config.dist_timeout_s))
    run = plan.run
    torch.set_num_threads(max(1, torch.get_num_threads() // run.world.world_size))
    keep_freed_memory()
    with process_group(run.world):
        engine = recipe.load().build(run, recipe_config)
        bare = SETUPS[name](materialise(meta_gpt(run), run, run.world.device), Block)
        batches = plan.batches(plan.train, engine.data_rank, engine.data_size)
        batch = batches.batch(0).to(run.world.device)
        ours, theirs = [], []
        where = folder / f"rank{run.world.rank}"
        where.mkdir()
        with (
            Recorder(run, where) as recorder,
            Prefetcher(batches, run.world.device) as data,
            redirect_stdout(StringIO()),
        ):
            for turn in range(rounds + 1):
                began = time.perf_counter()
                for _ in range(BLOCK_STEPS):
                    bare(batch.inputs, batch.targets).item()
                synchronize(run.world.device)
                between = time.perf_counter()
                start = turn * BLOCK_STEPS
                train(engine, data, recorder, lr_at=run.lr_at, start=start, steps=start + BLOCK_STEPS)
                synchronize(run.world.device)
                if turn:
                    theirs.append((between - began) / BLOCK_STEPS)
                    ours.append((time.perf_counter() - between) / BLOCK_STEPS)
        engine.close()
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return {
        "nproc": run.world.world_size,
        "n_params": run.gpt.n_params,
        "bare_step_s": statistics.median(theirs),
        "our_step_s": statistics.median(ours),
        "ratio": statistics.median(ratios),
        "ratio_p10": ratios[len(ratios) // 10],
        "ratio_p90": ratios[-1 - len(ratios) // 10],
        "device": device_name(run.world.device),
        "torch_version": torch.__version__,
    }


def worker(task: str) -> None:
    """A rank of `gptscale bench engines`."""
    import os

    name, rounds, model, n_embd, folder = json.loads(task)
    found = compare(name, rounds, model, n_embd, Path(folder))
    if os.environ["RANK"] == "0":
        (Path(folder) / "found.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    worker(sys.argv[1])
