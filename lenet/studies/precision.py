"""`gptscale lenet precision`: fp32, tf32, fp16 and bf16, with autocast and without, and the effect of fp16's loss scale.

It compares loss and accuracy by epoch, time, and measured memory. The average memory of report C (docs/lenet/README.md) was typed
in by hand.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from gptscale.common.errors import ConfigError, NumericError
from gptscale.common.settings.checks import OptionNeed, parse_names, parse_whole_numbers
from gptscale.lenet.comparison import tables
from gptscale.lenet.comparison.tables import ACCURACY, AVERAGE_MEMORY, PEAK_MEMORY, Column
from gptscale.lenet.data import Augmentation
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.studies.grid import Cell
from gptscale.lenet.studies.study import Lines, Study, StudyOptions, StudyResult, draw

MODES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"}, "tf32": {"precision": "tf32"}, "bf16": {"precision": "bf16"},
    "bf16-pure": {"precision": "bf16", "amp": False}, "fp16": {"precision": "fp16", "loss_scale": "dynamic"},
    # with the number of --loss-scale
    "fp16-fixed": {"precision": "fp16"}, "fp16-unscaled": {"precision": "fp16", "loss_scale": "none"},
    "fp16-pure": {"precision": "fp16", "amp": False, "loss_scale": "dynamic"},
    "fp16-pure-unscaled": {"precision": "fp16", "amp": False, "loss_scale": "none"},
}  # fmt: skip


@dataclass(frozen=True)
class PrecisionOptions(StudyOptions):
    """One model in every precision. Report C: vgg19 or resnet18, cifar10, 200 epochs, batch 256, rate 0.01."""

    modes: str = "auto"
    """fp32, tf32, bf16, bf16-pure, fp16, fp16-fixed, fp16-unscaled, fp16-pure, fp16-pure-unscaled with commas between; pure has
    no autocast. auto: all that this machine can compute."""
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
    devices: str = ""
    """Numbers of GPUs with commas between, each with a run of its own at the same time. On a CPU as many runs go on at once as
    there are numbers, with equal parts of its cores. Default: one run after the other."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        *StudyOptions.NEEDS,
        OptionNeed(
            "loss_scale",
            lambda c: c.modes == "auto" or "fp16-fixed" in c.modes.split(","),
            "{modes} has no fixed scale",
            "use --modes fp16-fixed",
        ),
    )

    @property
    def places(self) -> Sequence[Mapping[str, str]]:
        """The environment of each run that goes on beside others."""
        if not self.devices:
            return [{}]
        numbers = parse_whole_numbers(self.devices, "--devices", "use for example 0,1,2", least=0)
        import torch

        from gptscale.common.process.world import runs_on_cuda

        if not runs_on_cuda(self.device):
            threads = max(1, len(os.sched_getaffinity(0)) // len(numbers))
            return [{"OMP_NUM_THREADS": str(threads)}] * len(numbers)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        names = visible.split(",")
        if max(numbers) >= len(names):
            raise ConfigError(f"there are {len(names)} GPUs", "in --devices", f"use 0 to {len(names) - 1}")
        return [{"CUDA_VISIBLE_DEVICES": names[number]} for number in numbers]

    def run_options(self, mode: str) -> dict[str, Any]:
        fixed = {"loss_scale": self.loss_scale} if mode == "fp16-fixed" else {}
        return MODES[mode] | fixed | {"optimizer": "sgd", "lr": self.lr}


def choose(options: PrecisionOptions) -> tuple[list[str], dict[str, str]]:
    """Return the modes to run and the reason for each mode that `auto` leaves out.

    Raises ConfigError for an unknown mode.
    """
    if options.modes != "auto":
        return list(dict.fromkeys(parse_names(options.modes, MODES, "mode", "--modes"))), {}
    from gptscale.lenet.run.preflight import check_vision_precision, world_from_environment

    device, left_out = world_from_environment(VisionConfig(device=options.device)).device, dict[str, str]()
    for mode in MODES:
        config = VisionConfig(**options.run_options(mode))
        try:
            check_vision_precision(config, device)
        except ConfigError as error:
            left_out[mode] = error.what.removeprefix(f"{config.precision} ")
    return [mode for mode in MODES if mode not in left_out], left_out


def cells(options: PrecisionOptions) -> list[Cell]:
    """Return a cell for each mode, of which a loss that overflows is a result too, and print the modes that are left out."""
    modes, left_out = choose(options)
    for why in dict.fromkeys(left_out.values()):
        print(f"note: not run: {', '.join(mode for mode in left_out if left_out[mode] == why)}: {why}", flush=True)
    shared: dict[str, Any] = {"model": options.model, "batch_size": options.batch_size, "augment": options.augment}
    return [Cell(mode, shared | options.run_options(mode), accepts=(NumericError.exit_status,)) for mode in modes]


def not_run(result: StudyResult[PrecisionOptions]) -> Lines:
    """Return a row for each mode that is left out on this machine."""
    _, left_out = ([], {}) if result.options.rows else choose(result.options)
    return [{"run": f"{mode} (not run: {why.split(',')[0]})"} for mode, why in left_out.items()]


def notes(result: StudyResult[PrecisionOptions]) -> list[str]:
    """Return what report C ran, what memory means here, the runs that failed, and the modes as fast as the first one."""
    about = "report C: VGG-19 on CIFAR-10, 200 epochs, batch 256, SGD 0.01"
    return [about, result.memory_note(), *result.failures(), *tables.as_fast_as_the_first(result.groups, COLUMNS[0])]


COLUMNS = (
    Column("training s", "train_time_s", ".1f", spread=True),
    Column("images/s", "images_per_s", ",.0f"),
    AVERAGE_MEMORY,
    PEAK_MEMORY,
    Column("loss of the last batch", "loss_last", ".4f"),
    ACCURACY,
    Column("skipped steps", "skipped_steps", ".0f"),
)
STUDY = Study(
    options=PrecisionOptions,
    cells=cells,
    columns=COLUMNS,
    not_run=not_run,
    notes=notes,
    title=lambda result: result.title(f"batch {result.rows.batch_size.iloc[0]}"),
    more_tables=lambda result: [tables.accuracy_table(result.curves)],
    draw=partial(draw, [[PEAK_MEMORY, AVERAGE_MEMORY], COLUMNS[:1]]),
    places=lambda options: options.places,
)
