"""`gptscale lenet fused`: nets of 2 and 10 convolutions by PyTorch's operators and by the fused one, beside report D's.

All variants of a net start from the same weights, see the same batches and run in turn. Their losses must therefore agree, and
their times can be compared. docs/lenet/README.md says what report D is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gptscale.common.process.begin import keep_freed_memory, share_cores
from gptscale.common.settings.checks import parse_names
from gptscale.common.settings.command_line import parse
from gptscale.lenet.comparison.tables import ROWS, Lines, finish, spread, with_references
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.studies.study import StudyOptions
from gptscale.results.render import DPI, subplots

if TYPE_CHECKING:
    import pandas as pd

    from gptscale.lenet.run.preflight import ReadyVisionRun

# Columns that the table and the figure need.
COLUMNS = "net way forward_s backward_s loss_last accuracy data batch_size steps device threads torch_version".split()
NETS = ("conv2_shared", "conv2_independent", "conv10_shared", "conv10_independent")


@dataclass(frozen=True)
class FusedOptions(StudyOptions):
    """Every net in every way that the device has, `repeats` times in turn."""

    nets: str = ",".join(NETS)
    """Which nets, with commas between. With two layers, shared and independent are the same net."""
    batch_size: int = 64
    """Images per step."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """adam | sgd (with momentum 0.9)."""
    lr: float = 1e-3
    """Constant rate."""
    csv: Path | None = None
    """File for a row of each run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_names(self.nets, NETS, "net", "--nets", f"use {', '.join(NETS)}")


class NetVariant(NamedTuple):
    """One way to compute a net: on which kind of device, by the fused operator or not, with its library or without.

    library: cuDNN on a GPU and oneDNN on a CPU.
    """

    name: str
    device: str
    fused: bool = False
    library: bool = True


# Those of report D, in the order in which they run.
VARIANTS = (
    NetVariant("cuDNN", "cuda"),
    NetVariant("fused", "cuda", fused=True),
    NetVariant("cuDNN off", "cuda", library=False),
    NetVariant("CPU", "cpu"),
    NetVariant("CPU, fused", "cpu", fused=True),
    NetVariant("CPU, oneDNN off", "cpu", library=False),
)


def main(argv: Sequence[str]) -> int:
    """Train all nets in all variants, print the table, write the files."""
    options = parse(FusedOptions, argv, prog="gptscale lenet fused", about="Fused convolution, bias and ReLU in nets.")
    # After the options are read, because it takes long.
    import pandas as pd

    from gptscale.lenet.comparison.rows import read_details

    files = [read_details(Path(file), COLUMNS) for file in options.rows.split(",") if options.rows]
    frame = pd.concat(files, ignore_index=True) if files else measured(options)
    if options.csv:
        frame.to_csv(options.csv, index=False)
    machine = f"{frame.device[0]}, {frame.threads[0]} CPU threads, torch {frame.torch_version[0]}"
    note = f"{machine}; seconds of {frame.steps[0]} steps"
    finish([table(frame)], [note], options.md, options.picture("fused"), lambda path: draw(frame, path), [options.csv])
    return 0


def measured(options: FusedOptions) -> pd.DataFrame:
    """Train all nets in all variants and return a row for each run."""
    import pandas as pd
    import torch

    from gptscale.common.measure.devices import device_name
    from gptscale.lenet.run.preflight import ready_run, world_from_environment
    from gptscale.ops import registry as library

    share_cores()
    keep_freed_memory()
    names = "data data_dir download epochs max_steps batch_size optimizer lr device".split()
    config = VisionConfig(augment="none", channels_last=False, **{name: getattr(options, name) for name in names})
    world = world_from_environment(config)
    ready = ready_run(config, world)
    library.ready()
    rows, here = [], [variant for variant in VARIANTS if variant.device in ("cpu", world.device.type)]
    for turn in range(options.repeats):
        for net in options.nets.split(","):
            for variant in here:
                print(f"round {turn + 1} of {options.repeats}: {net}, {variant.name}", flush=True)
                seed = options.first_seed + turn
                device = world.device if variant.device == "cuda" else torch.device("cpu")
                run = replace(ready, config=replace(config, model=net, seed=seed), world=replace(world, device=device))
                rows.append({"net": net, "way": variant.name, "seed": seed} | train(variant, run))
    return pd.DataFrame(rows).assign(
        data=ready.data.name, batch_size=options.batch_size, epochs=options.epochs, steps=ready.steps,
        optimizer=options.optimizer, lr=options.lr, device=device_name(world.device), threads=torch.get_num_threads(),
        torch_version=torch.__version__,
    )  # fmt: skip


def train(variant: NetVariant, ready: ReadyVisionRun) -> dict[str, float]:
    """Train the net of the ready, and return the seconds of all steps, the first and last loss, and the test accuracy.

    Forward and backward each end by waiting for the device, so that their sum is no step time.
    """
    import torch

    from gptscale.common.measure.speed import synchronize
    from gptscale.lenet.models.registry import Convolutions
    from gptscale.lenet.run.engine import VisionEngine
    from gptscale.lenet.run.loop import TestSet, VisionBatches

    engine, data, times = VisionEngine(ready.config, ready.shape, ready.world), VisionBatches(ready), dict[str, float]()
    assert isinstance(engine.module, Convolutions)
    engine.module.fused = variant.fused
    # As torch has it unless it is told: the engine switches TF32 off.
    torch.backends.cudnn.allow_tf32 = True

    def timed(name: str, work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def work_timed(argument: Any) -> Any:
            synchronize(ready.world.device)
            began = time.perf_counter()
            result = work(argument)
            synchronize(ready.world.device)
            times[name] = times.get(name, 0.0) + time.perf_counter() - began
            return result

        return work_timed

    engine.loss, engine.backward = timed("forward_s", engine.loss), timed("backward_s", engine.backward)  # type: ignore[assignment, method-assign]
    library: Any = torch.backends.mkldnn if variant.device == "cpu" else torch.backends.cudnn
    before, library.enabled = library.enabled, variant.library
    try:
        losses = [engine.train_step(data.get(step), ready.config.lr).loss for step in range(ready.steps)]
        accuracy = engine.evaluate(TestSet(ready).batches()).accuracy
    finally:
        library.enabled = before
    return times | {"loss_first": losses[0].item(), "loss_last": losses[-1].item(), "accuracy": accuracy}


def table(frame: pd.DataFrame) -> Lines:
    """Return the lines of the table, then those of report D.

    Seconds are medians over the repeats with the lowest and the highest. Ratios are to the plain variant in the same round.
    """
    lines = []
    for (net, way), rows in frame.groupby(["net", "way"], sort=False):
        plain = frame[(frame.net == net) & (frame.way == ("CPU" if str(way).startswith("CPU") else "cuDNN"))]
        line = {"net": str(net), "way": str(way)}
        for name in ("forward", "backward"):
            seconds = rows[f"{name}_s"]
            ratio = statistics.median(a / b for a, b in zip(plain[f"{name}_s"], seconds, strict=True))
            line[f"{name} s"] = spread(seconds, ".2f")
            line[f"{name}, plain / this"] = f"{ratio:.2f}"
        line["last loss"] = f"{rows.loss_last.median():.4f}"
        line["accuracy %"] = f"{100 * rows.accuracy.median():.2f}"
        lines.append(line)
    return with_references(lines, ROWS["fused"])


def draw(frame: pd.DataFrame, path: Path) -> None:
    """Write a figure with a panel for each net: forward and backward seconds of each variant, stacked."""
    nets = list(dict.fromkeys(frame.net))
    title = f"{frame.data[0]}, batch {frame.batch_size[0]}, {frame.device[0]}"
    figure, panels = subplots(1, len(nets), (3.6 * len(nets), 3.2), title)
    for panel, net in zip(panels[0], nets, strict=True):
        medians = frame[frame.net == net].groupby("way", sort=False)[["forward_s", "backward_s"]].median()
        panel.bar(medians.index, medians.forward_s, label="forward")
        panel.bar(medians.index, medians.backward_s, bottom=medians.forward_s, label="backward")
        panel.set(title=net.removeprefix("conv").replace("_", " layers, "), ylabel="seconds")
        panel.tick_params(axis="x", labelrotation=20, labelsize=8)
        panel.grid(axis="y", alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=DPI)
