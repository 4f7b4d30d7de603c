"""The options by which a bench gets a model's shape and a device, to which a bench adds its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from benchmarks.quiet import QuietOptions
from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_ranges, did_you_mean
from gptscale.common.settings.gpt_config import PRESETS, GPTConfig


@dataclass(frozen=True)
class ShapeOptions(QuietOptions):
    """A preset with changes, how much of it at once, and where.

    On CUDA the defaults are 1.6b, bf16, batch 33. HIGHEST: the highest values of options whose limit is not 10**6.
    """

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
        numbers = [f.name for f in dataclasses.fields(self) if f.type in ("int", "int | None")]
        check_ranges(self, {name: (1, self.HIGHEST.get(name, 10**6)) for name in numbers})

    def on_cuda(self) -> bool:
        """Return whether to measure on CUDA, or raise ConfigError if it was asked for and is not there."""
        import torch

        is_available = torch.cuda.is_available()
        if self.device == "cuda" and not is_available:
            raise ConfigError("no CUDA device is visible", "in --device cuda", "use --device cpu")
        return is_available and self.device != "cpu"

    def gpt(self) -> GPTConfig:
        """Return the shape for this machine."""
        name = self.model or ("1.6b" if self.on_cuda() else None)
        preset = PRESETS[name] if name else self.CPU_SHAPE
        fields = {
            "hidden": "n_embd",
            "layers": "n_layer",
            "heads": "n_head",
            "seq_len": "block_size",
            "vocab_size": "vocab_size",
        }
        changes = {field: getattr(self, option) for option, field in fields.items()}
        return dataclasses.replace(preset, **{field: n for field, n in changes.items() if n is not None})


def check_bf16(dtype: str, cuda: bool, instead: str) -> None:
    """Raise ConfigError for bf16 on a GPU that emulates it, with the advice to use the dtype `instead`."""
    import torch

    from gptscale.common.measure.devices import supports_bf16

    if cuda and dtype == "bf16" and not supports_bf16(torch.cuda.get_device_capability()):
        raise ConfigError("bf16 needs Ampere or newer", "in --dtype", f"use --dtype {instead}")
