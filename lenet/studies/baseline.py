"""`gptscale lenet baseline`: LeNet-5 by a preset, beside the reports' figures, also by epoch and by class."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gptscale.common.settings.checks import check_name, parse_whole_numbers
from gptscale.lenet.comparison.tables import ACCURACY, RUNS, Column, accuracy_table, class_table, loss_table
from gptscale.lenet.models import Gelu
from gptscale.lenet.studies.grid import Cell
from gptscale.lenet.studies.study import GridOptions, Study, draw

# Report A gives four losses of an epoch, whose mean is the epoch's.
LOSSES_BY_EPOCH = (
    RUNS["adam"] | {"losses": [statistics.mean(losses) for losses in RUNS["adam"]["losses"]]},
    RUNS["affine"],
)


@dataclass(frozen=True)
class BaselineOptions(GridOptions):
    """LeNet-5 on one data set, once for each seed."""

    preset: str = "auto"
    """text (as in report B) | report_a | report_a_002 | report_a_sgd | onecycle | digits | fast | best | auto, which is digits or
    onecycle by --data."""
    seeds: str = "1,2,3"
    """Numbers with commas between; a run each."""
    gelu: Gelu | None = None
    """As in gptscale lenet train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.resolved_preset, PRESETS, "preset", "in --preset")

    @property
    def seed_numbers(self) -> Sequence[int]:
        return parse_whole_numbers(self.seeds, "--seeds", "use for example 1,2,3", least=0)

    @property
    def resolved_preset(self) -> str:
        if self.preset != "auto":
            return self.preset
        return "digits" if self.data == "digits" else "onecycle"


STUDY = Study(
    options=BaselineOptions,
    cells=lambda options: [Cell(options.resolved_preset, {"gelu": options.gelu, **PRESETS[options.resolved_preset]})],
    columns=(
        Column("epochs", "epochs", ".0f"),
        Column("batch", "batch_size", ".0f"),
        Column("highest rate", "lr", "g"),
        ACCURACY,
        Column("training s", "train_time_s", ".1f"),
        Column("to 99 %, s", "seconds_to_99", ".1f"),
        Column("to 99.4 %, s", "seconds_to_99_4", ".1f"),
        Column("images/s", "images_per_s", ",.0f"),
    ),
    notes=lambda result: result.failures(),
    title=lambda result: result.title(f"seeds {', '.join(map(str, dict.fromkeys(result.rows.seed)))}"),
    draw=partial(draw, [[ACCURACY]], reports=LOSSES_BY_EPOCH),
    more_tables=lambda result: [
        accuracy_table(result.curves),
        loss_table(result.curves, LOSSES_BY_EPOCH),
        class_table(result.groups, [RUNS["affine"]]),
    ],
)


# The package's operators, in the memory layout in which they are fast.
CUSTOM_OPERATORS = {"operators": "custom", "channels_last": False}
# LeNet-5 with Adam at a constant rate, and plain images.
REPORT_A = {"epochs": 10, "batch_size": 64, "lr_schedule": "constant", "augment": "none"}

PRESETS: dict[str, dict[str, Any]] = {
    # as in report B (docs/lenet/README.md)
    "text": {"epochs": 10, "batch_size": 32, "lr": 1e-3, "lr_schedule": "constant"},
    # as in report A, and the rate that it found to be worse
    "report_a": REPORT_A | {"lr": 1e-3}, "report_a_002": REPORT_A | {"lr": 2e-3},
    # SGD in its place, which report A calls far less efficient
    "report_a_sgd": REPORT_A | {"lr": 1e-2, "optimizer": "sgd"},
    # `text` with a learning rate that rises and falls
    "onecycle": {"epochs": 10, "batch_size": 32, "lr": 3e-3, "lr_schedule": "onecycle"},
    # more epochs, because 1,348 images make few steps an epoch
    "digits": {"epochs": 30, "batch_size": 32, "lr": 2e-3, "lr_schedule": "onecycle"},
    # 99 % of MNIST as soon as possible on two CPU cores
    "fast": {"epochs": 4, "batch_size": 128, "lr": 8e-3, "lr_schedule": "onecycle", "augment": "none"} | CUSTOM_OPERATORS,
    # 99.4 % of MNIST
    "best": {"epochs": 8, "batch_size": 128, "lr": 8e-3, "lr_schedule": "onecycle", "augment": "mild"} | CUSTOM_OPERATORS,
}  # fmt: skip
