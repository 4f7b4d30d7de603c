"""The options of `gptscale plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from gptscale.common.measure.gpus import SIMULATED
from gptscale.common.settings.checks import OptionNeed, check_output_file, check_ranges
from gptscale.common.settings.optimizers import OptimizerName
from gptscale.common.settings.run_config import RunConfig

DEVICE = "h100-80"


@dataclass(frozen=True)
class PlanOptions:
    """The work, the machines, and what to write."""

    model: str = "1.6b"
    """Preset, or a model of your own, as `gptscale run --model` has it."""
    n_layer: int | None = None
    """Overrides the preset's number of blocks."""
    n_embd: int | None = None
    """Overrides the preset's hidden size."""
    n_head: int | None = None
    """Overrides the preset's number of attention heads."""
    seq_len: int | None = None
    """Tokens per sequence. Default: the model's block_size."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all devices, by default 16 for each."""
    precision: Literal["fp32", "bf16", "fp8"] | None = None
    """Default bf16, and fp32 with --here."""
    optimizer: OptimizerName = "adamw"
    """Of the run, as `gptscale run` has it."""
    recipes: str = "all"
    """Names with commas between."""
    nodes: int = 1
    """Machines."""
    gpus_per_node: int = 8
    """Devices of one machine."""
    device: Annotated[str, tyro.conf.arg(help=f"{' | '.join(SIMULATED)}.")] = DEVICE
    link: str | None = None
    """Names with commas between: nvlink, nvlink3 to 5, pcie4, pcie5 in a node, ib-400, roce-400, ethernet-10 and others between
    nodes, in Gb/s of all ports of a node. Default: what the device usually has."""
    jobs_on_links: int = 1
    """Jobs that use the links between nodes at the same time, this one included. Each is taken to get an equal part."""
    host_memory: float | None = None
    """GiB of each machine's own memory, for recipes that keep state there. By default it is not checked."""
    here: bool = False
    """Plan for this machine's processor: rows are trained for a few steps."""
    nproc: int | None = None
    """Number of processes with --here. By default one for each core, at most 8."""
    calibration: Path | None = None
    """File of `gptscale calibrate`. By default the one that it writes. Without figures of the device, its data sheet counts."""
    rows: int = 8
    """Rows of the table: splits to try until so many fit."""
    explain: int | None = None
    """Say what a row's streams do when, and draw it with --png."""
    scaling: bool = False
    """Plan for fewer devices too, and draw tokens/s against their number with --png."""
    png: Path | None = None
    """The picture of --explain or --scaling, by default of the recommended row."""
    md: Path | None = None
    """The table as Markdown."""
    html: Path | None = None
    """The table and the picture as one page."""
    save: Path | None = None
    """The plan with a hash, for `gptscale run --plan`."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed("nproc", lambda o: o.here, "the devices are --nodes times --gpus-per-node", "add --here"),
        OptionNeed("jobs_on_links", lambda o: o.nodes > 1, "one node has no links to others", "add --nodes N"),
        OptionNeed(
            "nodes,gpus_per_node,device,link,jobs_on_links,host_memory,calibration,explain,scaling,png,html",
            lambda o: not o.here,
            "--here is this machine",
        ),
        OptionNeed("scaling", lambda o: o.png or o.html, "the picture has no file", "add --png FILE"),
    )

    def __post_init__(self) -> None:
        for name in ("png", "md", "html", "save"):
            check_output_file(getattr(self, name), f"--{name}")
        check_ranges(self, {"nodes": (1, 4096), "jobs_on_links": (1, 1000), "host_memory": (1, 1e6)})
        check_ranges(self, dict.fromkeys(("gpus_per_node", "nproc"), (1, 64)))
        check_ranges(self, dict.fromkeys(("rows", "explain"), (1, 100)))

    def work(self, ranks: int) -> RunConfig:
        """Return the options of a run that do not split it."""
        return RunConfig(
            **{name: getattr(self, name) for name in ("model", "n_layer", "n_embd", "n_head", "seq_len", "optimizer")},
            global_batch_size=self.global_batch_size or 16 * ranks,
            precision=self.precision or ("fp32" if self.here else "bf16"),
            device="cpu" if self.here else "cuda",
        )
