"""`gptscale lenet fused`: nets of 2 and 10 convolutions by PyTorch's operators and by the fused one, beside report D's.

All variants of a net start from the same weights, see the same batches and run in turn. Their losses must therefore agree, and
their times can be compared. docs/lenet/README.md says what report D is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptscale.common.measure.devices import device_name
from gptscale.common.measure.speed import synchronize
from gptscale.common.process.begin import keep_freed_memory, share_cores
from gptscale.common.settings.checks import parse_names
from gptscale.common.settings.command_line import parse
from gptscale.lenet.models.registry import Convolutions, build_model
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.loop import TestSet
from gptscale.lenet.run.preflight import VisionPlan, make_plan, world_from_environment
from gptscale.lenet.studies.reference_figures import FUSED_CONVOLUTIONS
from gptscale.lenet.studies.study import StudyOptions, finish
from gptscale.ops import registry as library
from gptscale.results.render import DPI, subplots

NETS = ("conv2_shared", "conv2_independent", "conv10_shared", "conv10_independent")


@dataclass(frozen=True)
class FusedOptions(StudyOptions):
    """Every net in every way that the device has, `repeats` times in turn."""

    nets: str = ",".join(NETS)
    """Which nets, with commas between. With two layers, shared and independent are the same net."""
    batch_size: int = 64
    """Images per step."""
    lr: float = 1e-3
    """Rate of Adam, constant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_names(self.nets, NETS, "net", "--nets", f"use {', '.join(NETS)}")


@dataclass(frozen=True)
class NetVariant:
    """One way to compute a net: on which device, by the fused operator or not, with cuDNN or not."""

    name: str
    device: torch.device
    fused: bool = False
    cudnn: bool = True


@dataclass(frozen=True)
class NetFigures:
    """The measurements of one net in one variant: seconds of all steps, first and last loss, and test accuracy."""

    forward_s: float
    backward_s: float
    loss_first: float
    loss_last: float
    accuracy: float


def main(argv: Sequence[str]) -> int:
    """Train all nets in all variants, print the table, write the files."""
    options = parse(FusedOptions, argv, prog="gptscale lenet fused", about="Fused convolution, bias and ReLU in nets.")
    share_cores()
    keep_freed_memory()
    config = VisionConfig(
        data=options.data, data_dir=options.data_dir, epochs=options.epochs, max_steps=options.max_steps,
        batch_size=options.batch_size, lr=options.lr, device=options.device, augment="none", channels_last=False,
    )  # fmt: skip
    world = world_from_environment(config)
    plan = make_plan(config, world)
    library.ready()
    rows = []
    for turn in range(options.repeats):
        for net in options.nets.split(","):
            for variant in variants(world.device):
                print(f"round {turn + 1} of {options.repeats}: {net}, {variant.name}", flush=True)
                run = replace(plan, config=replace(config, seed=turn + 1), world=replace(world, device=variant.device))
                rows.append({"net": net, "way": variant.name, "seed": turn + 1} | vars(train(net, variant, run)))
    frame = pd.DataFrame(rows).assign(
        data=plan.data.name, batch_size=options.batch_size, epochs=options.epochs, steps=plan.steps, lr=options.lr,
        device=device_name(world.device), threads=torch.get_num_threads(), torch_version=torch.__version__,
    )  # fmt: skip
    machine = f"{device_name(world.device)}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}"
    note = f"{machine}; seconds of {plan.steps} steps"
    finish("fused", options, frame, table(frame), [note], lambda path: draw(frame, path))
    return 0


def variants(device: torch.device) -> list[NetVariant]:
    """Return two variants on the CPU, and with a GPU also the other three of report D."""
    cpu = torch.device("cpu")
    on_cpu = [NetVariant("CPU", cpu), NetVariant("CPU, fused", cpu, fused=True)]
    if device.type != "cuda":
        return on_cpu
    cudnn_off = NetVariant("cuDNN off", device, cudnn=False)
    return [NetVariant("cuDNN", device), NetVariant("fused", device, fused=True), cudnn_off, *on_cpu]


def train(net: str, variant: NetVariant, plan: VisionPlan) -> NetFigures:
    """Train `net` with the options of the plan and return its measurements.

    Forward and backward each end by waiting for the device, so that their sum is no step time.
    """
    model = build_model(net, plan.shape, seed=plan.config.seed).to(variant.device)
    assert isinstance(model, Convolutions)
    model.fused = variant.fused
    optimizer = torch.optim.Adam(model.parameters(), lr=plan.config.lr, fused=True)
    losses: list[Tensor] = []
    times = {"forward": 0.0, "backward": 0.0}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        synchronize(variant.device)
        began = time.perf_counter()
        result = work()
        synchronize(variant.device)
        times[name] += time.perf_counter() - began
        return result

    loader = plan.loader()
    with cudnn(variant):
        for step in range(plan.steps):
            epoch, place = divmod(step, plan.batch_order.steps_per_epoch)
            if place == 0:
                batches = loader.epoch(epoch)
            images, labels = next(batches)
            loss = timed("forward", partial(_loss, model, images, labels))
            timed("backward", loss.backward)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        accuracy = _accuracy(model, plan)
    return NetFigures(times["forward"], times["backward"], losses[0].item(), losses[-1].item(), accuracy)


def cudnn(variant: NetVariant) -> AbstractContextManager[None]:
    """Return a context in which cuDNN is off for a variant without it."""
    return nullcontext() if variant.cudnn else torch.backends.cudnn.flags(enabled=False)  # type: ignore[no-any-return]


def _loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


@torch.no_grad()
def _accuracy(model: nn.Module, plan: VisionPlan) -> float:
    hits = [model(images).argmax(1) == labels for images, labels in TestSet(plan).batches()]
    return torch.cat(hits).float().mean().item()


def table(frame: pd.DataFrame) -> list[dict[str, str]]:
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
            line[f"{name} s"] = f"{seconds.median():.2f} ({seconds.min():.2f}-{seconds.max():.2f})"
            line[f"{name}, plain / this"] = f"{ratio:.2f}"
        line["last loss"] = f"{rows.loss_last.median():.4f}"
        line["accuracy %"] = f"{100 * rows.accuracy.median():.2f}"
        lines.append(line)
    empty = dict.fromkeys(lines[0], "-")
    with_cudnn = {layers: times for layers, way, *times in FUSED_CONVOLUTIONS if way == "cuDNN"}
    for layers, way, forward_s, backward_s, accuracy in FUSED_CONVOLUTIONS:
        plain_forward_s, plain_backward_s, _ = with_cudnn[layers]
        lines.append(
            empty
            | {"net": f"report D: {layers} layers", "way": way}
            | {"forward s": f"{forward_s:.2f}", "forward, plain / this": f"{plain_forward_s / forward_s:.2f}"}
            | {"backward s": f"{backward_s:.2f}", "backward, plain / this": f"{plain_backward_s / backward_s:.2f}"}
            | {"accuracy %": f"{accuracy:.2f}"}
        )
    return lines


def draw(frame: pd.DataFrame, path: Path) -> None:
    """Write a figure with a panel for each net: forward and backward seconds of each variant, stacked."""
    nets = list(dict.fromkeys(frame.net))
    title = f"{frame.data[0]}, batch {frame.batch_size[0]}, {frame.device[0]}"
    figure, panels = subplots(1, len(nets), (3.6 * len(nets), 3.2), title)
    for panel, net in zip(panels[0], nets, strict=True):
        medians = frame[frame.net == net].groupby("way", sort=False)[["forward_s", "backward_s"]].median()
        panel.bar(medians.index, medians.forward_s, label="forward")
        panel.bar(medians.index, medians.backward_s, bottom=medians.forward_s, label="backward")
        panel.set(title=net, ylabel="seconds")
        panel.tick_params(axis="x", labelrotation=20, labelsize=8)
        panel.grid(axis="y", alpha=0.3)
    panels[0][-1].legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=DPI)
