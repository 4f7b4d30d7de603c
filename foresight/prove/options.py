"""What `gptscale prove` is asked: two programs, or a recipe that becomes two, and how they are compared."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gptscale.common.settings.checks import OptionNeed, check_output_file, check_ranges
from gptscale.common.settings.run_config import AXIS_SIZES, KEPT, RunConfig
from gptscale.launchers.run.options import default_recipe_config, option_words, parse_launch


@dataclass(frozen=True)
class ProofOptions:
    """How two programs are compared."""

    tolerance: float | None = None
    """The largest relative deviation that is right. By default 1e-5, or what bf16 or fp16 can do."""
    time_limit: int = 300
    """Seconds after which a program that has not made its steps is ended."""
    json: Path | None = None
    """File for the answer and its figures."""

    def __post_init__(self) -> None:
        check_ranges(self, {"tolerance": (1e-12, 1.0), "time_limit": (1, 10**6)})
        check_output_file(self.json, "--json", "cannot be written")


@dataclass(frozen=True, kw_only=True)
class ProveOptions(ProofOptions):
    """Which two programs, and how they are compared."""

    reference: str
    """The command of one process, in quotes."""
    candidate: str
    """The command that splits the same work: all its ranks together take as many samples in a step."""
    steps: int = 3
    """Steps of the optimizer that are compared."""
    own_data: bool = False
    """Let the candidate read its own data. By default it gets what the reference's DataLoader has given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"steps": (1, 1000)})


@dataclass(frozen=True)
class ProveRecipeOptions(ProofOptions):
    """How many ranks, and how they are compared."""

    nproc: int = 2
    """Ranks of the recipe. The reference is `single`."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed(",".join(KEPT), lambda o: False, "a proof is a few steps and leaves no run"),
    )


def of_recipe(recipe: str, words: Sequence[str], folder: Path) -> ProveOptions:
    """Return the two commands that compare a recipe with one process."""
    config, recipe_config, own = parse_launch(recipe, words, ProveRecipeOptions, "prove")
    assert own is not None
    steps = 3 if config.steps == RunConfig().steps else config.steps
    batch = config.global_batch_size or 4 * own.nproc
    config = dataclasses.replace(config, steps=steps, global_batch_size=batch, device="cpu", out=folder)
    config = dataclasses.replace(config, tensorboard=False, verdict=False)

    def command(name: str, ranks: int) -> str:
        options = recipe_config if name == recipe else default_recipe_config(name)
        axes: dict[str, Any] = {} if name == recipe else dict.fromkeys(AXIS_SIZES)
        words = option_words(name, dataclasses.replace(config, run_name=f"{name}-{ranks}", **axes), options)
        return shlex.join([sys.executable, "-m", "gptscale.launchers.cli", "run", name, "--nproc", str(ranks), *words])

    programs = {"reference": command("single", 1), "candidate": command(recipe, own.nproc)}
    return ProveOptions(own.tolerance, own.time_limit, own.json, **programs, steps=steps, own_data=True)
