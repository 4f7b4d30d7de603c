"""The command `gptscale calibrate`: what this machine can do, measured in a minute or two and kept in a file."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gptscale.common.errors import ConfigError
from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.common.settings.checks import check_output_file, check_ranges, parse_whole_numbers
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.run_config import Precision, RunConfig

if TYPE_CHECKING:
    from gptscale.common.process.world import World
    from gptscale.foresight.calibrate.worker import CalibrationTask

# Facts of RunConfig that a shape is made of.
SHAPE = ("model", "n_layer", "n_head", "n_embd", "vocab_size", "seq_len", "precision")


@dataclass(frozen=True)
class CalibrateOptions:
    """The model whose parts are measured, on how many ranks, and where the figures go."""

    model: str = "tiny"
    """Preset whose shapes are measured."""
    n_layer: int | None = None
    """Overrides the preset's number of blocks."""
    n_head: int | None = None
    """Overrides the preset's number of attention heads."""
    n_embd: int | None = None
    """Overrides the preset's hidden size."""
    vocab_size: int | None = None
    """Overrides the preset's vocabulary."""
    seq_len: int | None = None
    """Tokens per sequence. Default: the model's block_size."""
    micro_batch_size: str = "2,4,8"
    """Sequences per forward on one device: numbers with commas between, each of which is measured."""
    tp: str = "1"
    """Numbers of tensor ranks, with commas between, whose parts of a block are measured."""
    precision: Precision = "fp32"
    """Of the products."""
    nproc: int | None = None
    """Ranks that are measured together. Default: one per GPU, or 2 on a CPU. Under torchrun it is the size of its world."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when it is there."""
    repeats: int = 9
    """Rounds, of which the median is kept."""
    out: Path | None = None
    """File to add to. Default: calibration-2.json in the package's cache (XDG_CACHE_HOME)."""

    def __post_init__(self) -> None:
        check_ranges(self, {"repeats": (3, 1000), "nproc": (1, 1024)})
        check_output_file(self.out, "--out", "cannot be written")
        self.config()
        self.tensor_ranks()

    def config(self) -> RunConfig:
        """Return a run of the shape. Raises ConfigError for a shape that is none."""
        return RunConfig(data="synthetic", **self.shapes()[0])

    def shapes(self) -> list[dict[str, Any]]:
        """Return the shape at each micro-batch, as fields of RunConfig."""
        sizes = parse_whole_numbers(self.micro_batch_size, "--micro-batch-size", "use for example 2,4,8")
        shape = {name: getattr(self, name) for name in SHAPE}
        return [shape | {"micro_batch_size": size} for size in dict.fromkeys(sizes)]

    def tensor_ranks(self) -> list[int]:
        """Return the numbers of tensor ranks."""
        heads, words = self.config().gpt().n_head, self.tp.split(",")
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        if not all(word.strip().isdecimal() and int(word) in fits for word in words):
            raise ConfigError(f"{self.tp!r} does not divide {heads} heads", "in --tp", f"use one or more of {fits}")
        return [int(word) for word in words]


def main(argv: Sequence[str]) -> int:
    """Measure on all ranks at once, add the figures to the file, and print them."""
    about = "Measure what this machine can do: products, attention, memory, collectives. gptscale plan and why use it."
    options = parse(CalibrateOptions, argv, prog="gptscale calibrate", about=about)
    begin_warm_parent(options.device, imports=["gptscale.launchers.run.start", "gptscale.foresight.calibrate.worker"])
    # After the options are parsed, because they import torch.
    import torch

    from gptscale.common.process.program import Program
    from gptscale.common.process.ranks import launch
    from gptscale.common.process.world import World, runs_on_cuda, world_of
    from gptscale.foresight.calibrate import file, worker

    cuda, out = runs_on_cuda(options.device), options.out or file.default_file()
    launched = "WORLD_SIZE" in os.environ
    nproc = options.nproc or (torch.cuda.device_count() if cuda else 2)
    world = World.from_environment(options.device) if launched else world_of(options.device, None, nproc)
    file.read(out)
    task = worker.CalibrationTask(
        shapes=options.shapes(),
        out=str(out.absolute()),
        tp=options.tensor_ranks(),
        device=options.device,
        repeats=options.repeats,
    )
    if launched:
        return worker.as_rank(task.device, lambda world: _measure_and_show(task, world))
    words = (json.dumps(dataclasses.asdict(task)),)
    what = f"{options.model} on {world.world_size} ranks of {world.device.type}"
    print(f"measuring {what} ...", file=sys.stderr, flush=True)
    if status := launch(Program("gptscale.foresight.calibrate.worker", words), world.world_size, fork=not cuda):
        return status
    show(out)
    return 0


def _measure_and_show(task: CalibrationTask, world: World) -> None:
    """Be one of the ranks that torchrun or a job started, of which the first prints what was measured."""
    from gptscale.foresight.calibrate.worker import measure_and_keep

    measure_and_keep(task, world)
    if world.is_main:
        show(Path(task.out))


def show(path: Path) -> None:
    """Print what was measured last."""
    from gptscale.foresight.calibrate.file import read
    from gptscale.results import render

    last = read(path)[-1]
    columns = ("operation", "shape", "ms", "spread")
    rows = [
        (t.operation.kind, " ".join(map(str, t.operation.shape)), f"{t.seconds * 1e3:,.3f}", f"{t.spread:.0%}")
        for t in last.operations
    ]
    console = render.console(130, highlight=False)
    console.print(render.table(columns, rows))
    machine = last.machine
    console.print(f"{machine.device}, torch {machine.torch}, {machine.threads} threads, {machine.world} ranks at once")
    print(f"added to {path}")
