"""`gptscale minigrad`: models trained on MNIST with this package's small autograd, beside report B's figures.

docs/lenet/README.md says what report B is.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pandas as pd
import torch
from rich.console import Console

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import device_name
from gptscale.common.settings.checks import check_ranges
from gptscale.common.settings.command_line import parse
from gptscale.lenet.minigrad import report
from gptscale.lenet.minigrad.digits import Digits, open_digits
from gptscale.lenet.minigrad.timing import StepTimes, time_steps
from gptscale.lenet.minigrad.training import Epoch, train
from gptscale.ops import registry as library
from gptscale.ops.minigrad import models
from gptscale.ops.minigrad.layers import Convolution, Module
from gptscale.ops.minigrad.optimizers import SGD, Adam, Optimizer
from gptscale.results import render

PoolBackward = Literal["auto", "loop", "python", "cpp", "triton"]
DEFAULT_LR = {"adam": 1e-3, "sgd": 0.1}
DEFAULT_TIMED_STEPS = 3


@dataclass(frozen=True)
class MinigradOptions:
    """Train models with the package's small autograd (gptscale.ops.minigrad) and compare with the old figures."""

    model: Literal["all", "pure_linear", "simple_conv", "LeNet"] = "all"
    """One model, or the three in turn."""
    epochs: int = 20
    """Passes over the training images."""
    batch_size: int = 128
    """Images per step."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam or SGD; the learning rate falls to 0 on half a cosine."""
    lr: float | None = None
    """Learning rate at the start; default 0.001 for adam, 0.1 for sgd."""
    momentum: float = 0.0
    """Of sgd."""
    pool_backward: PoolBackward = "auto"
    """LeNet's max pooling backward: auto | loop (naive Python, hundreds of times slower) | python | cpp | triton."""
    convolution: Convolution = "kernel"
    """kernel (gptscale.ops.conv, with bias and ReLU in one) | im2col (the lesson's own)."""
    data: str = "digits"
    """digits (scikit-learn's, 1,347 to learn from) | a folder with MNIST's four idx files."""
    train_samples: int | None = None
    """Learn from only so many images."""
    timed_steps: int | None = None
    """Steps of LeNet to time by operation, loop against kernel; default 3, 0 to leave it out."""
    seed: int = 0
    """Fixes the weights and the order of the images."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    threads: int | None = None
    """CPU threads; default what torch takes."""
    csv: Path | None = None
    """File for the rows; the times of operations go beside it, to NAME-ops.csv."""
    png: Path | None = None
    """File for a picture of the curves."""

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "epochs": (1, 10_000), "batch_size": (1, 100_000), "train_samples": (1, 10**9), "timed_steps": (0, 1000),
            "seed": (0, 2**63 - 1), "threads": (1, 1024),
        }  # fmt: skip
        check_ranges(self, ranges)
        if self.lr is not None and not 0 < self.lr <= 100:
            raise ConfigError(f"lr {self.lr} is out of range", "in --lr", "use 0.001 for adam, 0.1 for sgd")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum {self.momentum} is out of range", "in --momentum", "use 0.0 to 0.99")
        if self.momentum and self.optimizer == "adam":
            raise ConfigError("adam takes no momentum", "in --momentum", "add --optimizer sgd, or leave it out")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("there is no CUDA device", "in --device", "use --device cpu")
        self._check_layers()
        for name in ("csv", "png"):
            if (path := getattr(self, name)) is not None:
                _check_output(path, name)

    def _check_layers(self) -> None:
        """Raise ConfigError for an option of layers that the model does not have."""
        if self.model in ("pure_linear", "simple_conv"):
            fix = "add --model LeNet"
            if self.pool_backward != "auto":
                raise ConfigError(f"{self.model} has no pooling", "in --pool-backward", fix)
            if self.timed_steps:
                raise ConfigError(f"{self.model} has no pooling", "in --timed-steps", fix)
        if self.model == "pure_linear" and self.convolution != "kernel":
            raise ConfigError("pure_linear has no convolution", "in --convolution", "add --model simple_conv")

    @property
    def names(self) -> tuple[models.ModelName, ...]:
        """The models to train."""
        return get_args(models.ModelName) if self.model == "all" else (self.model,)

    @property
    def peak_lr(self) -> float:
        return self.lr if self.lr is not None else DEFAULT_LR[self.optimizer]

    @property
    def place(self) -> torch.device:
        """The device to train on."""
        best = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(best if self.device == "auto" else self.device)

    def pooling(self, pool_backward: PoolBackward) -> PoolBackward:
        """Return the implementation of `pool_backward` on this machine, or raise ConfigError if it cannot run here."""
        if pool_backward in ("loop", "python"):
            return pool_backward
        try:
            library.require(pool_backward, self.place)
        except ValueError as error:
            raise ConfigError(str(error), "in --pool-backward", "use auto, or python") from None
        if self.place.type == "cuda":
            return "triton"
        return "cpp" if library.ready() else "python"


def _check_output(path: Path, name: str) -> None:
    if path.suffix != f".{name}":
        raise ConfigError(f"{path} does not end in .{name}", f"in --{name}", f"use {path.with_suffix(f'.{name}')}")
    if not path.parent.is_dir():
        raise ConfigError(f"folder {path.parent} does not exist", f"in --{name}", f"mkdir -p {path.parent}")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written", f"in --{name}", "choose another file")


def main(argv: Sequence[str]) -> int:
    """Train the models, print their tables, write the files, and return 0."""
    options = parse(MinigradOptions, argv, prog="gptscale minigrad", about=str(MinigradOptions.__doc__))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    digits = open_digits(options.data, options.train_samples)
    if "LeNet" in options.names:
        options = dataclasses.replace(options, pool_backward=options.pooling(options.pool_backward))
    console = render.console(120)
    print(f"{digits.name}: {len(digits.train):,} images to learn from, {len(digits.test):,} to test with")
    if not digits.is_whole_mnist:
        print("the old figures are of the whole of MNIST (--data FOLDER), so none stand beside these")
    rows: list[dict[str, object]] = []
    runs: dict[str, pd.DataFrame] = {}
    reported: dict[str, pd.DataFrame] = {}
    for name in options.names:
        runs[name] = _trained(name, options, digits, rows)
        if digits.is_whole_mnist:
            reported[name] = report.report_run(name, options.pool_backward)
        console.print(report.epochs_table(runs[name], reported.get(name)))
    if "LeNet" in options.names and options.timed_steps != 0:
        _time_operations(options, digits, console)
    if options.png is not None:
        report.draw(options.png, runs, reported, _title(options, digits))
    for path in (options.csv, options.png):
        if path is not None:
            print(f"wrote {path}")
    return 0


def _trained(
    name: models.ModelName, options: MinigradOptions, digits: Digits, rows: list[dict[str, object]]
) -> pd.DataFrame:
    """Train one model, append a row of each epoch to `rows`, and return the model's rows.

    After every epoch all of `rows` is in the CSV.
    """
    model = _model(name, options, options.pool_backward)
    optimizer = _optimizer(options, model)
    print(f"\n{name}: {sum(p.array.numel() for p in model.parameters()):,} parameters, {_title(options, digits)}")
    data = digits.train.to(options.place), digits.test.to(options.place)
    facts = _facts(name, options, digits)
    first = len(rows)
    for epoch in train(
        model, optimizer, *data, epochs=options.epochs, batch_size=options.batch_size, seed=options.seed
    ):
        print(_line(epoch, options.epochs), flush=True)
        rows.append({"model": name, **dataclasses.asdict(epoch), **facts})
        if options.csv is not None:
            report.write_csv(options.csv, rows)
    return pd.DataFrame(rows[first:])


def _model(name: models.ModelName, options: MinigradOptions, pool_backward: str) -> Module:
    model = models.build(name, seed=options.seed, convolution=options.convolution, pool_backward=pool_backward)
    model.to(options.place)
    return model


def _optimizer(options: MinigradOptions, model: Module) -> Optimizer:
    if options.optimizer == "adam":
        return Adam(model.parameters(), options.peak_lr)
    return SGD(model.parameters(), options.peak_lr, momentum=options.momentum)


def _line(epoch: Epoch, epochs: int) -> str:
    return (
        f"epoch {epoch.epoch} of {epochs}: test loss {epoch.test_loss:.4f}, test error {epoch.test_err:.2%}, "
        f"{epoch.epoch_time_s:.2f} s"
    )


def _facts(name: models.ModelName, options: MinigradOptions, digits: Digits) -> dict[str, object]:
    """Return what must be known to repeat a row."""
    return {
        "optimizer": options.optimizer,
        "lr": options.peak_lr,
        "momentum": options.momentum,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "convolution": options.convolution if name != "pure_linear" else "",
        "pool_backward": options.pool_backward if name == "LeNet" else "",
        "data": digits.name,
        "train_samples": len(digits.train),
        "device": device_name(options.place),
        "threads": torch.get_num_threads(),
        "torch_version": torch.__version__,
    }


def _title(options: MinigradOptions, digits: Digits) -> str:
    device = device_name(options.place)
    n = torch.get_num_threads()
    cpu_threads = f", {n} threads" if n > 1 else f", {n} thread"
    threads = "" if options.place.type == "cuda" else cpu_threads
    return f"{options.optimizer} {options.peak_lr:g}, batch {options.batch_size}, {digits.name}, {device}{threads}"


def _time_operations(options: MinigradOptions, digits: Digits, console: Console) -> None:
    """Time LeNet's step by operation with the naive pooling backward and with a kernel, on the same weights and batch."""
    kernel = options.pooling("auto") if options.pool_backward == "loop" else options.pool_backward
    steps = DEFAULT_TIMED_STEPS if options.timed_steps is None else options.timed_steps
    batch = digits.train.to(options.place)
    images, labels = batch.images[: options.batch_size], batch.labels[: options.batch_size]
    print(f"\ntiming {steps} steps of {len(labels)} images", flush=True)
    times: dict[str, StepTimes] = {
        name: time_steps(_model("LeNet", options, name), images, labels, steps) for name in ("loop", kernel)
    }
    console.print(report.times_table(times["loop"], times[kernel], kernel))
    if options.csv is not None:
        path = options.csv.with_name(f"{options.csv.stem}-ops.csv")
        facts = _facts("LeNet", options, digits) | {"batch_size": len(labels), "steps": steps}
        rows = [dataclasses.asdict(step) | facts | {"pool_backward": name} for name, step in times.items()]
        report.write_csv(path, rows)
        print(f"wrote {path}")
