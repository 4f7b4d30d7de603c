"""One rank of `python -m benchmarks.engines`: an engine of ours and its own minimal loop, timed block by block in turn."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from torch import nn

from benchmarks.engines.minimal_splits import LIBRARY_SETUPS, SETUPS
from gptscale.common.data.loader import Prefetcher, to_device
from gptscale.common.measure.devices import device_name
from gptscale.common.measure.speed import synchronize
from gptscale.common.model.build import materialise, meta_gpt
from gptscale.common.model.gpt import Block
from gptscale.common.process.begin import keep_freed_memory
from gptscale.common.process.world import World, process_group
from gptscale.common.settings.run import Run
from gptscale.common.train import train
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get
from gptscale.results.record.recorder import Recorder

BLOCK_STEPS = 4
# Options that a recipe's minimal loop fixes too. With --nproc 4 hybrid_3d has data ranks as well.
SPLITS = {"hybrid_3d": ["--tp-size", "2"]}


def run_words(name: str, rounds: int, model: str, n_embd: int, folder: Path) -> list[str]:
    """Return the options of the recipe's run."""
    words = ["--model", model, "--n-embd", str(n_embd), "--data", "synthetic", "--out", str(folder), "--lr", "1e-3"]
    words += ["--steps", str(BLOCK_STEPS * (rounds + 1)), "--lr-schedule", "constant", "--no-tensorboard"]
    return [*words, *SPLITS.get(name, [])]


def compare(name: str, rounds: int, model: str, n_embd: int, folder: Path) -> dict[str, object]:
    """Build both loops of the recipe `name`, run them in turn, and return this rank's row.

    The row has the median seconds per step of each, and the ratio over pairs of blocks.
    """
    recipe = get(name)
    config, recipe_config = parse_run(name, run_words(name, rounds, model, n_embd, folder))
    plan = preflight(name, config, recipe_config, World.from_environment(config.device, config.dist_timeout_s))
    run = plan.run
    torch.set_num_threads(max(1, torch.get_num_threads() // run.world.world_size))
    keep_freed_memory()
    our_s: list[float] = []
    minimal_s: list[float] = []
    with process_group(run.world):
        engine = recipe.load().build(run, recipe_config)
        # Files that a library leaves on disk go with the folder.
        tempfile.tempdir = str(folder)
        minimal_step = LIBRARY_SETUPS[name](run) if name in LIBRARY_SETUPS else SETUPS[name](whole_model(run), Block)
        batches = plan.batches(plan.train, engine.data_rank, engine.data_size)
        batch = to_device(batches.batch(0), run.world.device)
        run_folder = folder / f"rank{run.world.rank}"
        run_folder.mkdir()
        with (
            Recorder(run, run_folder) as recorder,
            Prefetcher(batches, run.world.device) as data,
            redirect_stdout(StringIO()),
        ):
            for turn in range(rounds + 1):
                began = time.perf_counter()
                for _ in range(BLOCK_STEPS):
                    minimal_step(batch.inputs, batch.targets).item()
                synchronize(run.world.device)
                between = time.perf_counter()
                start = turn * BLOCK_STEPS
                train(engine, data, recorder, lr_at=run.lr_at, start=start, steps=start + BLOCK_STEPS)
                synchronize(run.world.device)
                # The first turn warms up.
                if turn:
                    minimal_s.append((between - began) / BLOCK_STEPS)
                    our_s.append((time.perf_counter() - between) / BLOCK_STEPS)
        engine.close()
    ratios = sorted(our_time / minimal for our_time, minimal in zip(our_s, minimal_s, strict=True))
    return {
        "nproc": run.world.world_size,
        "n_params": run.gpt.n_params,
        "bare_step_s": statistics.median(minimal_s),
        "our_step_s": statistics.median(our_s),
        "ratio": statistics.median(ratios),
        "ratio_p10": ratios[len(ratios) // 10],
        "ratio_p90": ratios[-1 - len(ratios) // 10],
        "device": device_name(run.world.device),
        "torch_version": torch.__version__,
    }


def whole_model(run: Run) -> nn.Module:
    """Return the package's GPT with its initial weights on this process's device."""
    return materialise(meta_gpt(run), run, run.world.device)


def main(task: str) -> None:
    """Compare the loops of a task in JSON, whose folder rank 0 leaves its row in."""
    name, rounds, model, n_embd, folder = json.loads(task)
    row = compare(name, rounds, model, n_embd, Path(folder))
    if os.environ["RANK"] == "0":
        (Path(folder) / "row.json").write_text(json.dumps(row))
    sys.stdout.flush()
    # At once, because a library's threads may hang in the interpreter's teardown.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
