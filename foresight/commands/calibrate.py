"""The command `gptscale calibrate`: what this machine can do, measured in a minute or two and kept in a file."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.common.settings.command_line import parse
from gptscale.foresight.calibrate.options import CalibrateOptions


def main(argv: Sequence[str]) -> int:
    """Measure on all ranks at once. The first adds the figures to the file, and prints them."""
    about = "Measure what this machine can do: products, attention, memory, collectives. gptscale plan and why use it."
    options = parse(CalibrateOptions, argv, prog="gptscale calibrate", about=about)
    begin_warm_parent(options.device, imports=["gptscale.launchers.run.start", "gptscale.foresight.calibrate.worker"])
    # After the options are parsed, because they import torch.
    import torch

    from gptscale.common.process.program import Program
    from gptscale.common.process.ranks import launch
    from gptscale.common.process.world import runs_on_cuda, world_of
    from gptscale.foresight.calibrate import file, worker

    cuda, out = runs_on_cuda(options.device), options.out or file.default_file()
    options = dataclasses.replace(options, out=out.absolute())
    file.read(out)
    if "WORLD_SIZE" in os.environ:
        worker.as_rank(options)
    nproc = options.nproc or (torch.cuda.device_count() if cuda else 2)
    world = world_of(options.device, None, nproc)
    what = f"{options.model} on {world.world_size} ranks of {world.device.type}"
    print(f"measuring {what} ...", file=sys.stderr, flush=True)
    words = (json.dumps(dataclasses.asdict(options), default=str),)
    return launch(Program("gptscale.foresight.calibrate.worker", words), world.world_size, fork=not cuda)
