"""`gptscale checkpoint`: a checkpoint for another program, or from one."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import tyro

from gptscale.common.checkpoint.folders import step_folders
from gptscale.common.errors import ConfigError, StorageError
from gptscale.common.settings.checks import OptionNeed
from gptscale.common.settings.command_line import parse


@dataclass(frozen=True)
class CheckpointOptions:
    """What goes where. A checkpoint of a run is that of any recipe and world, and continues as any other."""

    action: tyro.conf.Positional[Literal["export", "import"]]
    """export: of a run, for others. import: a folder of others, as a checkpoint for --resume."""
    source: tyro.conf.Positional[Path]
    """The folder of a run (its newest checkpoint), of a step-N, or to import."""
    out: Path
    """New folder to write. For import it gets a step-N."""
    format: Literal["hf", "dcp"] = "hf"
    """hf: transformers' config.json and safetensors, weights alone | dcp: torch.distributed.checkpoint, with optimizer state."""
    config: Path | None = None
    """The folder with transformers' config.json of a DCP folder to import."""
    trust: bool = False
    """Read a DCP folder, whose metadata is a pickle: whoever wrote it can run code here."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed(
            "config,trust",
            lambda c: (c.action, c.format) == ("import", "dcp"),
            "no DCP folder is read",
            "use import --format dcp",
        ),
    )


def main(argv: Sequence[str]) -> int:
    """Write the folder whole, or leave nothing."""
    about = "A checkpoint for other programs, or from one."
    options = parse(CheckpointOptions, argv, prog="gptscale checkpoint", about=about)
    if options.out.exists():
        raise ConfigError(f"{options.out} is there already", "in --out", "name a new folder")
    if not options.source.is_dir():
        raise ConfigError(f"there is no folder {options.source}", "on the command line", "name one that is there")
    # torch takes a second to import, and a wrong word is told before.
    from gptscale.common.checkpoint import exchange
    from gptscale.common.checkpoint.reader import Reader

    part = options.out.absolute().with_name(f".{options.out.name}-{uuid.uuid4().hex[:8]}")
    try:
        part.mkdir(parents=True)
        if options.action == "export":
            steps = step_folders(options.source / "checkpoints")
            if not steps and (options.source / "run.json").exists():
                what = "the run has saved no checkpoint"
                raise ConfigError(what, f"in {options.source}", "train it with --save-last")
            reader = Reader((steps or [options.source])[0]).verify()
            (exchange.to_transformers if options.format == "hf" else exchange.to_dcp)(reader, part)
            said = f"step {reader.step} of {reader.path}"
        elif options.format == "hf":
            said = exchange.from_transformers(options.source, part).name
        else:
            if not (options.trust and options.config):
                fix = "add --config FOLDER, and --trust if you know who wrote it"
                raise ConfigError("the metadata of a DCP folder is a pickle", f"in {options.source}", fix)
            said = exchange.from_dcp(options.source, options.config, part).name
        part.rename(options.out)
    except OSError as error:
        why = error.strerror or str(error)
        raise StorageError(why, f"while writing {options.out}", "free space, or name another folder") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"{options.out}: {said}" + f"; go on with --resume {options.out}/{said}" * (options.action == "import"))
    return 0
