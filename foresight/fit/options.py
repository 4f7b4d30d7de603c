"""The options of `gptscale fit`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gptscale.common.errors import ConfigError
from gptscale.common.measure.gpus import SIMULATED
from gptscale.common.settings.checks import check_output_file, check_ranges
from gptscale.foresight.mock_cuda.devices import device_named


@dataclass(frozen=True)
class FitOptions:
    """The model, the machines, and what to write."""

    model: tyro.conf.Positional[str]
    """A function that returns a module, as FILE.py:NAME or package.module:NAME. Or hf:FOLDER or hf:CONFIG.json of transformers.
    Or a preset, such as 1.6b."""
    batch: str = ""
    """A function in the same spelling that returns a batch of so many samples: a tensor, a list or a dictionary of them. A second
    parameter gets the number of the micro-batch. Default: batch, beside the model."""
    loss: str = ""
    """A function of outputs and batch in the same spelling, where the last value of a list may be for it alone. By default the
    model's output is the loss, or has it."""
    small: str = ""
    """A function in the same spelling that returns a narrow model for the proof, which takes the same batches."""
    seq_len: int | None = None
    """Tokens of a sample, for hf: and presets."""
    gpus: int = 8
    """Devices, of all machines."""
    nodes: int = 1
    """Machines."""
    device_kind: Annotated[str, tyro.conf.arg(name="as", help=f"The device: {' | '.join(SIMULATED)}.")] = "h100-80"
    link: str | None = None
    """What connects devices and nodes, as `gptscale plan --link` has it."""
    global_batch_size: int | None = None
    """Samples of an optimizer step over all devices, by default 8 for each."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of products. Weights and the optimizer's state are fp32."""
    splits: str = "all"
    """Names of the table with commas between, such as ddp,fsdp."""
    write: Path | None = None
    """File for the program."""
    row: int = 1
    """The row of the table whose program is written."""

    def __post_init__(self) -> None:
        device_named(self.device_kind)
        check_ranges(self, {"gpus": (1, 2**16), "nodes": (1, 4096), "row": (1, 100)})
        check_ranges(self, dict.fromkeys(("global_batch_size", "seq_len"), (1, 2**24)))
        if self.gpus % self.nodes:
            raise ConfigError(
                f"{self.gpus} GPUs are not the same number on each of {self.nodes} nodes", "in --gpus", "change one"
            )
        if self.samples % self.gpus:
            fix = f"use a multiple of {self.gpus}"
            raise ConfigError(
                f"a batch of {self.samples} cannot be dealt to {self.gpus} GPUs", "in --global-batch-size", fix
            )
        if self.write is not None:
            check_output_file(self.write, "--write")
            path = self.write
            # It must be a module of its own, or another could not be imported beside it.
            if path.exists():
                raise ConfigError(f"{path} is there already", "in --write", "name a new file")
            if path.suffix != ".py" or not path.stem.isidentifier():
                raise ConfigError(f"{path.name} is no name of a program", "in --write", "name it train.py")
            if importlib.util.find_spec(path.stem) is not None:
                raise ConfigError(f"{path.name} would hide the module {path.stem}", "in --write", "name it train.py")

    @property
    def samples(self) -> int:
        return self.global_batch_size or 8 * self.gpus
