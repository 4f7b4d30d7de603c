"""The options of `gptscale minigrad`, which are read before torch is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_ranges

if TYPE_CHECKING:
    import torch

ModelName = Literal["pure_linear", "simple_conv", "LeNet"]
Convolution = Literal["kernel", "im2col"]
PoolBackward = Literal["auto", "loop", "windows", "python", "cpp", "triton"]
DEFAULT_LR = {"adam": 1e-3, "sgd": 0.1}
MODEL_NAMES: tuple[ModelName, ...] = get_args(ModelName)


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
    """Adam or SGD. The learning rate falls to 0 on half a cosine."""
    lr: float | None = None
    """Learning rate at the start. Default: 0.001 for adam, 0.1 for sgd."""
    momentum: float = 0.0
    """Of sgd."""
    pool_backward: PoolBackward = "auto"
    """LeNet's max pooling backward: auto | loop (element by element, slow) | windows (one by one) | python | cpp | triton."""
    convolution: Convolution = "kernel"
    """kernel (gptscale.ops.conv, with bias and ReLU in one) | im2col (the lesson's own)."""
    data: str = "digits"
    """digits (scikit-learn's, 1,347 to learn from) | a folder with MNIST's four idx files."""
    train_samples: int | None = None
    """Learn from only so many images."""
    timed_steps: int | None = None
    """Steps of LeNet to time by operation, loop against kernel. Default: 3. 0 leaves it out."""
    seed: int = 0
    """Fixes the weights and the order of the images."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    threads: int | None = None
    """CPU threads. Default: what torch takes."""
    csv: Path | None = None
    """File for the rows. The times of operations go beside it, to NAME-ops.csv."""
    md: Path | None = None
    """File for the last epochs and the times of operations in Markdown, beside the old figures."""
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
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise ConfigError("there is no CUDA device", "in --device", "use --device cpu")
        self._check_layers()
        for name in ("csv", "md", "png"):
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
    def names(self) -> tuple[ModelName, ...]:
        """The models to train."""
        return MODEL_NAMES if self.model == "all" else (self.model,)

    @property
    def peak_lr(self) -> float:
        return self.lr if self.lr is not None else DEFAULT_LR[self.optimizer]

    @property
    def place(self) -> torch.device:
        """The device to train on."""
        import torch

        best = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(best if self.device == "auto" else self.device)

    def pooling(self, pool_backward: PoolBackward) -> PoolBackward:
        """Return the implementation of `pool_backward` on this machine, or raise ConfigError if it cannot run here."""
        if pool_backward in ("loop", "windows", "python"):
            return pool_backward
        from gptscale.ops import registry as library

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
