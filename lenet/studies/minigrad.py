"""`gptscale lenet minigrad`: models trained on digits with this package's small autograd, beside report B's figures.

docs/lenet/README.md says what report B is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import OptionNeed, check_ranges
from gptscale.common.settings.command_line import parse
from gptscale.lenet.comparison.tables import Lines, finish
from gptscale.lenet.studies.study import StudyFiles

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from gptscale.lenet.data.sources import VisionData
    from gptscale.lenet.minigrad.layers import Module

ModelName = Literal["pure_linear", "simple_conv", "LeNet"]
PoolBackward = Literal["auto", "loop", "windows", "python", "cpp", "triton"]
LOOPS = ("loop", "windows")
DEFAULT_LR = {"adam": 1e-3, "sgd": 0.1}


@dataclass(frozen=True)
class MinigradOptions(StudyFiles):
    """Train models with a small autograd (gptscale.lenet.minigrad) and compare with the old figures."""

    model: Literal["all", "pure_linear", "simple_conv", "LeNet"] = "all"
    """One model, or the three in turn."""
    epochs: int = 20
    """Passes over the training images."""
    batch_size: int = 128
    """Images per step."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam or SGD. The learning rate falls to 0 on half a cosine."""
    lr: float | None = None
    """Learning rate at the start. Default: 0.001 for adam, 0.1 for sgd."""
    momentum: float = 0.0
    """Momentum of sgd."""
    pool_backward: PoolBackward = "auto"
    """LeNet's max pooling backward: auto | loop (element by element, slow) | windows (one by one) | python | cpp | triton."""
    convolution: Literal["kernel", "im2col"] = "kernel"
    """kernel (gptscale.ops.conv, with bias and ReLU in one) | im2col (the lesson's own)."""
    train_samples: int | None = None
    """Learn from only so many images."""
    timed_steps: int = 3
    """Steps of LeNet to time by operation, loop against kernel. 0 leaves it out."""
    seed: int = 0
    """Fixes the weights and the order of the images."""
    threads: int | None = None
    """CPU threads. Default: what torch takes."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        *StudyFiles.NEEDS,
        OptionNeed("momentum", lambda c: c.optimizer == "sgd", "adam takes no momentum", "add --optimizer sgd"),
        OptionNeed(
            "pool_backward,timed_steps", lambda c: "LeNet" in c.names, "{model} has no pooling", "use --model LeNet"
        ),
        OptionNeed(
            "convolution", lambda c: c.model != "pure_linear", "{model} has no convolution", "use --model LeNet"
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges: dict[str, tuple[float, float]] = {
            "epochs": (1, 10_000), "batch_size": (1, 100_000), "train_samples": (1, 10**9), "timed_steps": (0, 1000),
            "seed": (0, 2**63 - 1), "threads": (1, 1024),
        }  # fmt: skip
        check_ranges(self, ranges)
        if self.lr is not None and not 0 < self.lr <= 100:
            raise ConfigError(f"lr {self.lr} is out of range", "in --lr", "use 0.001 for adam, 0.1 for sgd")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum {self.momentum} is out of range", "in --momentum", "use 0.0 to 0.99")

    @property
    def names(self) -> tuple[ModelName, ...]:
        return get_args(ModelName) if self.model == "all" else (self.model,)

    @property
    def peak_lr(self) -> float:
        return self.lr if self.lr is not None else DEFAULT_LR[self.optimizer]

    @property
    def place(self) -> torch.device:
        from gptscale.common.process.world import world_of

        return world_of(self.device, None, 1).device

    def pooling(self, pool_backward: PoolBackward) -> PoolBackward:
        """Return the implementation of `pool_backward` on this machine, or raise ConfigError if it cannot run here."""
        from gptscale.ops import max_pool, registry

        if pool_backward == "auto":
            return "triton" if self.place.type == "cuda" else "cpp" if registry.ready() else "python"
        try:
            registry.chosen(max_pool.BACKWARD, pool_backward, self.place)
        except ValueError as error:
            raise ConfigError(str(error), "in --pool-backward", "use auto, or python") from None
        return pool_backward


def main(argv: Sequence[str]) -> int:
    """Train the models, print their tables, write the files, and return 0."""
    options = parse(MinigradOptions, argv, prog="gptscale lenet minigrad", about=str(MinigradOptions.__doc__))
    # After the options are parsed, because it imports torch and pandas.
    import torch

    from gptscale.lenet.minigrad import report
    from gptscale.lenet.minigrad.training import is_whole_mnist, open_digits

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if "LeNet" in options.names:
        options = dataclasses.replace(options, pool_backward=options.pooling(options.pool_backward))
    digits = open_digits(options.data, options.data_dir, options.train_samples, download=options.download)
    print(f"{digits.name}: {len(digits.train):,} images to learn from, {len(digits.test):,} to test with")
    if not is_whole_mnist(digits):
        print("the old figures are of the whole of MNIST (--data mnist), so none stand beside these")
    rows: list[dict[str, object]] = []
    runs: dict[str, pd.DataFrame] = {}
    reported: dict[str, pd.DataFrame] = {}
    for name in options.names:
        runs[name] = trained(name, options, digits, rows)
        if is_whole_mnist(digits):
            reported[name] = report.report_run(name, options.pool_backward)
    pages, written = [report.last_lines(runs, reported)], [options.csv] if options.csv else []
    if "LeNet" in options.names and options.timed_steps:
        pages += timed_operations(options, digits)
        written += [_operations_csv(options.csv)] if options.csv else []
    heading = title(options, digits)
    png = options.picture("minigrad")
    finish(pages, [], options.md, png, lambda path: report.draw(path, runs, reported, heading), written)
    return 0


def trained(
    name: ModelName, options: MinigradOptions, digits: VisionData, rows: list[dict[str, object]]
) -> pd.DataFrame:
    """Train one model, append a row of each epoch to `rows`, and return the model's rows.

    After every epoch all of `rows` is in the CSV.
    """
    import pandas as pd

    from gptscale.lenet.minigrad.optimizers import SGD, Adam
    from gptscale.lenet.minigrad.training import train

    model = built(name, options, options.pool_backward)
    parameters, lr = model.parameters(), options.peak_lr
    by_adam = options.optimizer == "adam"
    optimizer = Adam(parameters, lr) if by_adam else SGD(parameters, lr, momentum=options.momentum)
    print(f"\n{name}: {sum(p.array.numel() for p in parameters):,} parameters, {title(options, digits)}")
    learned, held_out, first = digits.train.to(options.place), digits.test.to(options.place), len(rows)
    shared: dict[str, Any] = {name: getattr(options, name) for name in ("epochs", "batch_size", "seed")}
    for epoch in train(model, optimizer, learned, held_out, **shared):
        print(
            f"epoch {epoch.epoch} of {options.epochs}: test loss {epoch.test_loss:.4f}, test error {epoch.test_err:.2%}, "
            f"{epoch.epoch_time_s:.2f} s",
            flush=True,
        )
        rows.append({"model": name, **dataclasses.asdict(epoch), **facts(name, options, digits)})
        if options.csv is not None:
            pd.DataFrame(rows).to_csv(options.csv, index=False, float_format="%.6g")
    return pd.DataFrame(rows[first:])


def built(name: ModelName, options: MinigradOptions, pool_backward: str) -> Module:
    """Return a model on the device, with the weights of the seed."""
    from gptscale.lenet.minigrad.layers import build

    model = build(name, seed=options.seed, convolution=options.convolution, pool_backward=pool_backward)
    model.to(options.place)
    return model


def facts(name: str, options: MinigradOptions, digits: VisionData) -> dict[str, object]:
    """Return what must be known to repeat a row."""
    import torch

    from gptscale.common.measure.devices import device_name

    return {
        "optimizer": options.optimizer, "lr": options.peak_lr, "momentum": options.momentum,
        "batch_size": options.batch_size, "seed": options.seed,
        "convolution": options.convolution if name != "pure_linear" else "",
        "pool_backward": options.pool_backward if name == "LeNet" else "",
        "data": digits.name, "train_samples": len(digits.train), "device": device_name(options.place),
        "threads": torch.get_num_threads(), "torch_version": torch.__version__,
    }  # fmt: skip


def title(options: MinigradOptions, digits: VisionData) -> str:
    """Return what all models share: the optimizer, the batch, the images and the device."""
    shared = facts("", options, digits)
    threads = "" if options.place.type == "cuda" else f", threads: {shared['threads']}"
    return f"{options.optimizer} {options.peak_lr:g}, batch {options.batch_size}, {digits.name}, {shared['device']}{threads}"


def timed_operations(options: MinigradOptions, digits: VisionData) -> list[Lines]:
    """Return a table for each naive pooling backward, of LeNet's step by operation with it and with a kernel.

    The weights and the batch are the same.
    """
    import pandas as pd

    from gptscale.lenet.minigrad import report
    from gptscale.lenet.minigrad.training import time_steps

    kernel = options.pooling("auto") if options.pool_backward in LOOPS else options.pool_backward
    batch, n = digits.train.to(options.place), min(options.batch_size, len(digits.train))
    print(f"\ntiming {options.timed_steps} steps of {n} images", flush=True)
    names = (*LOOPS, kernel)
    times = {
        name: time_steps(built("LeNet", options, name), batch.images[:n], batch.labels[:n], options.timed_steps)
        for name in names
    }
    if options.csv is not None:
        of_all = facts("LeNet", options, digits) | {"batch_size": n, "steps": options.timed_steps}
        rows = [step._asdict() | of_all | {"pool_backward": name} for name, step in times.items()]
        pd.DataFrame(rows).to_csv(_operations_csv(options.csv), index=False, float_format="%.6g")
    return [report.times_lines(times[loop], times[kernel], loop, kernel) for loop in LOOPS]


def _operations_csv(csv: Path) -> Path:
    return csv.with_name(f"{csv.stem}-ops.csv")
