"""`gptscale minigrad`: models trained on MNIST with this package's small autograd, beside report B's figures.

docs/lenet/README.md says what report B is.
"""

from __future__ import annotations

import dataclasses

import pandas as pd
import torch

from gptscale.common.measure.devices import device_name
from gptscale.lenet.minigrad import report
from gptscale.lenet.minigrad.digits import Digits, open_digits
from gptscale.lenet.minigrad.options import MinigradOptions
from gptscale.lenet.minigrad.timing import StepTimes, time_steps
from gptscale.lenet.minigrad.training import Epoch, train
from gptscale.ops.minigrad import models
from gptscale.ops.minigrad.layers import Module
from gptscale.ops.minigrad.optimizers import SGD, Adam, Optimizer
from gptscale.results import render

DEFAULT_TIMED_STEPS = 3


def run(options: MinigradOptions) -> int:
    """Train the models, print their tables, write the files, and return 0."""
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
    pages = [report.last_lines(runs, reported)]
    if "LeNet" in options.names and options.timed_steps != 0:
        pages += _time_operations(options, digits)
    for lines in pages:
        console.print(report.printed(lines))
    if options.md is not None:
        options.md.write_text("\n".join(render.markdown(lines, left=list(lines[0])[:1]) for lines in pages))
    if options.png is not None:
        report.draw(options.png, runs, reported, _title(options, digits))
    for path in (options.csv, options.md, options.png):
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


def _time_operations(options: MinigradOptions, digits: Digits) -> list[list[dict[str, str]]]:
    """Return a table for each naive pooling backward, of LeNet's step by operation with it and with a kernel.

    The weights and the batch are the same.
    """
    loops = ("loop", "windows")
    kernel = options.pooling("auto") if options.pool_backward in loops else options.pool_backward
    steps = DEFAULT_TIMED_STEPS if options.timed_steps is None else options.timed_steps
    batch = digits.train.to(options.place)
    images, labels = batch.images[: options.batch_size], batch.labels[: options.batch_size]
    print(f"\ntiming {steps} steps of {len(labels)} images", flush=True)
    times: dict[str, StepTimes] = {
        name: time_steps(_model("LeNet", options, name), images, labels, steps) for name in (*loops, kernel)
    }
    if options.csv is not None:
        path = options.csv.with_name(f"{options.csv.stem}-ops.csv")
        facts = _facts("LeNet", options, digits) | {"batch_size": len(labels), "steps": steps}
        rows = [dataclasses.asdict(step) | facts | {"pool_backward": name} for name, step in times.items()]
        report.write_csv(path, rows)
        print(f"wrote {path}")
    return [report.times_lines(times[loop], times[kernel], loop, kernel) for loop in loops]
