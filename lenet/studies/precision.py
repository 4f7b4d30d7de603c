"""`gptscale lenet precision`: fp32, tf32, fp16 and bf16, with autocast and without, and what fp16 owes to its loss scale.

Loss and accuracy by epoch, time, and memory as it was measured; the text typed its average memory in by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from gptscale.common.errors import ConfigError, NumericError
from gptscale.common.settings.checks import did_you_mean
from gptscale.common.settings.command_line import parse
from gptscale.lenet.data import Augmentation
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.preflight import check_vision_precision, world_from_environment
from gptscale.lenet.studies.bars import bars
from gptscale.lenet.studies.reference_figures import PRECISION, PRECISION_MODES
from gptscale.lenet.studies.study import (
    AVERAGE_MEMORY,
    PEAK_MEMORY,
    Cell,
    Column,
    StudyOptions,
    failures,
    finish,
    grouped,
    memory_note,
    not_significant,
    of,
    run_grid,
    table,
)

MODES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "bf16-pure": {"precision": "bf16", "amp": False},
    "fp16": {"precision": "fp16", "loss_scale": "dynamic"},
    "fp16-fixed": {"precision": "fp16"},  # with --loss-scale
    "fp16-unscaled": {"precision": "fp16", "loss_scale": "none"},
    "fp16-pure": {"precision": "fp16", "amp": False, "loss_scale": "dynamic"},
    "fp16-pure-unscaled": {"precision": "fp16", "amp": False, "loss_scale": "none"},
}
FP16_INSTRUCTIONS = {"avx512_fp16", "amx_fp16", "asimdhp"}  # as /proc/cpuinfo names them on x86 and Arm


@dataclass(frozen=True)
class PrecisionOptions(StudyOptions):
    """One model in every precision. The text: vgg19 or resnet18, cifar10, 200 epochs, batch 256, rate 0.01."""

    modes: str = "auto"
    """fp32, tf32, bf16, bf16-pure, fp16, fp16-fixed, fp16-unscaled, fp16-pure, fp16-pure-unscaled with commas between; pure has
    no autocast. auto: all that this machine has arithmetic for."""
    loss_scale: str = "1024"
    """Of fp16-fixed; that of fp16 and fp16-pure is dynamic."""
    model: str = "vgg19"
    """As in gptscale lenet train."""
    epochs: int = 2
    """Of each run."""
    repeats: int = 1
    """Turns of the whole grid, each with a seed of its own."""
    batch_size: int = 64
    """Images per step."""
    lr: float = 0.01
    """Constant rate of SGD with momentum 0.9."""
    augment: Augmentation = "none"
    """As in gptscale lenet train; flip is for photographs."""

    def asked(self, mode: str) -> dict[str, Any]:
        """The options of a run in `mode`."""
        fixed = {"loss_scale": self.loss_scale} if mode == "fp16-fixed" else {}
        return MODES[mode] | fixed | {"optimizer": "sgd", "lr": self.lr}


COLUMNS = (
    Column("training s", of("train_time_s"), ".1f", spread=True),
    Column("images/s", of("images_per_s"), ",.0f"),
    AVERAGE_MEMORY,
    PEAK_MEMORY,
    Column("last loss", of("loss_last"), ".4f"),
    Column("accuracy %", of("test_accuracy", 100), ".2f", spread=True),
    Column("skipped steps", of("skipped_steps"), ".0f"),
)


def choose(options: PrecisionOptions) -> tuple[list[str], dict[str, str]]:
    """Modes to run, and for each that `auto` leaves out why; ConfigError for one that was named and cannot run."""
    if options.modes != "auto":
        for mode in options.modes.split(","):
            if mode not in MODES:
                raise ConfigError(f"unknown mode {mode!r}", "in --modes", did_you_mean(mode, MODES))
        return list(dict.fromkeys(options.modes.split(","))), {}
    device = world_from_environment(VisionConfig(device=options.device)).device
    missing = {mode: why for mode in MODES if (why := lacks(options.asked(mode), device))}
    return [mode for mode in MODES if mode not in missing], missing


def lacks(asked: dict[str, Any], device: torch.device) -> str | None:
    """Why a device has no arithmetic for a mode, or None if it has."""
    config = VisionConfig(**asked)
    try:
        check_vision_precision(config, device)
    except ConfigError as error:
        return error.what.removeprefix(f"{config.precision} ")
    if asked["precision"] == "fp16" and device.type == "cpu" and not FP16_INSTRUCTIONS & cpu_flags():
        return "needs fp16 instructions, without which it is many times slower than fp32"
    return None


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What the processor can do, in the kernel's words; nothing off Linux."""
    if not cpuinfo.is_file():
        return set()
    lines = (line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
    return next((set(words.split()) for key, words in lines if key.strip() in ("flags", "Features")), set())


def grid(options: PrecisionOptions, modes: Sequence[str]) -> list[Cell]:
    """A run for each mode; that a loss overflows is a result."""
    same: dict[str, Any] = {"model": options.model, "batch_size": options.batch_size, "augment": options.augment}
    return [Cell(mode, same | options.asked(mode), accepts=(NumericError.exit_status,)) for mode in modes]


def main(argv: Sequence[str]) -> int:
    """Run the grid, print the table, write the files."""
    options = parse(PrecisionOptions, argv, prog="gptscale lenet precision", about="Precisions, measured.")
    modes, missing = choose(options)
    for why in dict.fromkeys(missing.values()):
        print(f"note: not run: {', '.join(mode for mode in missing if missing[mode] == why)}: {why}", flush=True)
    cells = grid(options, modes)
    rows = run_grid("precision", cells, options)
    groups = grouped(rows, cells)
    lines = table(groups, COLUMNS)
    empty = dict.fromkeys(lines[0], "-")
    lines += [empty | {"run": f"{mode} (not run: {why.split(',')[0]})"} for mode, why in missing.items()]
    lines.append(empty | {"run": f"text C: {', '.join(PRECISION_MODES)} (curves only)"})
    notes = [f"text C: {PRECISION}", memory_note(rows), *failures(rows)]
    for mode in modes[1:]:
        notes += not_significant({modes[0]: groups[modes[0]], mode: groups[mode]}, COLUMNS[0])
    title = f"{options.model} on {rows.data.iloc[0]}, batch {options.batch_size}, {rows.device.iloc[0]}"
    finish("precision", options, rows, lines, notes, lambda path: draw(groups, options.out, title, path))
    return 0


def draw(groups: dict[str, list[Any]], out: Path, title: str, path: Path) -> None:
    """Training loss and test accuracy by epoch, memory and time by mode; seeds as thin lines, bars are medians."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ((loss, accuracy), (memory, seconds)) = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    colours = dict(zip(MODES, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    for mode, rows in groups.items():
        for i, row in enumerate(rows):
            epochs = pd.read_csv(out / "runs" / row.run_id / "epochs.csv")
            look: dict[str, Any] = {"color": colours[mode], "marker": "o", "markersize": 3, "linewidth": 1}
            loss.plot(epochs.epoch, epochs.train_loss, label=None if i else mode, **look)
            accuracy.plot(epochs.epoch, 100 * epochs.test_accuracy, label=None if i else mode, **look)
    for axes, name in ((loss, "training loss"), (accuracy, "test accuracy (%)")):
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    accuracy.legend(fontsize=8)
    bars(memory, groups, (PEAK_MEMORY, AVERAGE_MEMORY), "memory (GiB)")
    bars(seconds, groups, COLUMNS[:1], "training time (s)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
