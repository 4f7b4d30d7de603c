"""Settings of vision runs that are known to work, by name."""

from __future__ import annotations

from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import did_you_mean

# The package's operators, in the memory layout in which they are fast.
CUSTOM_OPERATORS = {"operators": "custom", "channels_last": False}
# LeNet-5 with Adam at a constant rate, and plain images.
REPORT_A = {"epochs": 10, "batch_size": 64, "lr_schedule": "constant", "augment": "none"}

PRESETS: dict[str, dict[str, Any]] = {
    # as in report B (docs/lenet/README.md)
    "text": {"epochs": 10, "batch_size": 32, "lr": 1e-3, "lr_schedule": "constant"},
    # as in report A, and the rate that it found to be worse
    "report_a": REPORT_A | {"lr": 1e-3},
    "report_a_002": REPORT_A | {"lr": 2e-3},
    # SGD in its place, which report A calls far less efficient
    "report_a_sgd": REPORT_A | {"lr": 1e-2, "optimizer": "sgd"},
    # `text` with a learning rate that rises and falls
    "onecycle": {"epochs": 10, "batch_size": 32, "lr": 3e-3, "lr_schedule": "onecycle"},
    # more epochs, because 1,348 images make few steps an epoch
    "digits": {"epochs": 30, "batch_size": 32, "lr": 2e-3, "lr_schedule": "onecycle"},
    # 99 % of MNIST as soon as possible on two CPU cores
    "fast": {"epochs": 4, "batch_size": 128, "lr": 8e-3, "lr_schedule": "onecycle", "augment": "none"}
    | CUSTOM_OPERATORS,
    # 99.4 % of MNIST
    "best": {"epochs": 8, "batch_size": 128, "lr": 8e-3, "lr_schedule": "onecycle", "augment": "mild"}
    | CUSTOM_OPERATORS,
}


def preset(name: str) -> dict[str, Any]:
    """Return the options of a preset, or raise ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}", "in --preset", did_you_mean(name, PRESETS))
    return PRESETS[name]
