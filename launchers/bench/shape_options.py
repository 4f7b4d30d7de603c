"""The options by which a bench is told a model's shape and a device; `bench model` and `bench parts` add their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import supports_bf16
from gptscale.common.settings.checks import did_you_mean
from gptscale.common.settings.gpt_config import PRESETS, GPTConfig


@dataclass(frozen=True)
class ShapeOptions:
    """A preset with changes, how much of it at once, and where; on CUDA the defaults are 1.6b, bf16, batch 33."""

    CPU_SHAPE: ClassVar[GPTConfig]
    HIGHEST: ClassVar[Mapping[str, int]] = {"threads": 1024, "batch_size": 10**5, "layers": 10**4}

    model: str | None = None
    """Preset; default 1.6b on CUDA, a small shape on a CPU."""
    hidden: int | None = None
    """Overrides the model's hidden size."""
    layers: int | None = None
    """Overrides its number of layers."""
    heads: int | None = None
    """Overrides its number of heads."""
    seq_len: int | None = None
    """Overrides its tokens per sequence."""
    vocab_size: int | None = None
    """Overrides its vocabulary."""
    batch_size: int | None = None
    """Sequences at once; default on CUDA 33 (33 x 1024 rows are whole waves of an H200's 132 processors), fewer on a CPU."""
    threads: int = 2
    """CPU threads."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when it is there."""

    def __post_init__(self) -> None:
        if self.model is not None and self.model not in PRESETS:
            raise ConfigError(f"unknown model {self.model!r}", "in --model", did_you_mean(self.model, PRESETS))
        for name in (f.name for f in dataclasses.fields(self) if f.type in ("int", "int | None")):
            value, most = getattr(self, name), self.HIGHEST.get(name, 10**6)
            if value is not None and not 1 <= value <= most:
                option = f"in --{name.replace('_', '-')}"
                raise ConfigError(f"{name} {value} is out of range", option, f"use 1 to {most}")

    def on_cuda(self) -> bool:
        """Whether to measure on CUDA; ConfigError if it was asked for and is not there."""
        there = torch.cuda.is_available()
        if self.device == "cuda" and not there:
            raise ConfigError("no CUDA device is visible", "in --device cuda", "use --device cpu")
        return there and self.device != "cpu"

    def gpt(self) -> GPTConfig:
        """The shape for this machine."""
        preset = PRESETS[self.model] if self.model else PRESETS["1.6b"] if self.on_cuda() else self.CPU_SHAPE
        fields = {"hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "seq_len": "block_size"}
        changes = {fields.get(o, o): v for o in (*fields, "vocab_size") if (v := getattr(self, o)) is not None}
        return dataclasses.replace(preset, **changes)


def check_bf16(dtype: str, cuda: bool, instead: str) -> None:
    """ConfigError for bf16 on a GPU that emulates it."""
    if cuda and dtype == "bf16" and not supports_bf16(torch.cuda.get_device_capability()):
        raise ConfigError("bf16 needs Ampere or newer", "in --dtype", f"use --dtype {instead}")


def check_file(option: str, path: Path | None) -> None:
    """ConfigError if the file could not be written in the end."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{path} cannot be written", f"in {option}", "name a file in a folder that exists")
