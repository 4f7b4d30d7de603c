"""The options of `gptscale calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_output_file, check_ranges, parse_whole_numbers
from gptscale.common.settings.run_config import Precision, RunConfig

# Facts of RunConfig that a shape is made of.
SHAPE = ("model", "n_layer", "n_head", "n_embd", "vocab_size", "seq_len", "precision")


@dataclass(frozen=True)
class CalibrateOptions:
    """The model whose parts are measured, on how many ranks, and where the figures go."""

    model: str = "tiny"
    """Preset whose shapes are measured."""
    n_layer: int | None = None
    """Overrides the preset's number of blocks."""
    n_head: int | None = None
    """Overrides the preset's number of attention heads."""
    n_embd: int | None = None
    """Overrides the preset's hidden size."""
    vocab_size: int | None = None
    """Overrides the preset's vocabulary."""
    seq_len: int | None = None
    """Tokens per sequence. Default: the model's block_size."""
    micro_batch_size: str = "2,4,8"
    """Sequences per forward on one device: numbers with commas between, each of which is measured."""
    tp: str = "1"
    """Numbers of tensor ranks, with commas between, whose parts of a block are measured."""
    precision: Precision = "fp32"
    """Of the products."""
    nproc: int | None = None
    """Ranks that are measured together. Default: one per GPU, or 2 on a CPU. Under torchrun it is the size of its world."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when it is there."""
    repeats: int = 9
    """Rounds, of which the median is kept."""
    out: Path | None = None
    """File to add to. Default: calibration-2.json in the package's cache (XDG_CACHE_HOME)."""

    def __post_init__(self) -> None:
        check_ranges(self, {"repeats": (3, 1000), "nproc": (1, 1024)})
        check_output_file(self.out, "--out", "cannot be written")
        self.tensor_ranks()

    def runs(self) -> list[RunConfig]:
        """Return a run of the shape at each micro-batch. Raises ConfigError for a shape that no model has."""
        sizes = parse_whole_numbers(self.micro_batch_size, "--micro-batch-size", "use for example 2,4,8")
        shape = {name: getattr(self, name) for name in SHAPE}
        return [RunConfig(data="synthetic", micro_batch_size=size, **shape) for size in dict.fromkeys(sizes)]

    def tensor_ranks(self) -> list[int]:
        heads, words = self.runs()[0].gpt().n_head, self.tp.split(",")
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        if not all(word.strip().isdecimal() and int(word) in fits for word in words):
            raise ConfigError(f"{self.tp!r} does not divide {heads} heads", "in --tp", f"use one or more of {fits}")
        return [int(word) for word in words]
