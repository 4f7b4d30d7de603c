"""`gptscale prove`: does a split program compute what one process computes? Tensor by tensor, on this CPU."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_output_file, check_range
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.needs import OptionNeed
from gptscale.common.settings.run_config import KEPT, RunConfig
from gptscale.foresight.prove.answer import as_json, print_answer
from gptscale.foresight.prove.compare import Comparison
from gptscale.foresight.prove.program import ProveTask, record
from gptscale.foresight.simulate.processes import ProgramError, print_error
from gptscale.launchers.run.options import default_recipe_config, option_words, parse_launch
from gptscale.results.record.files import export
from gptscale.results.render import console

ABOUT = "Two commands that train the same model: do they compute the same, tensor by tensor?"


@dataclass(frozen=True)
class ProveOptions:
    """Which two programs, and how they are compared."""

    reference: str
    """The command of one process, in quotes."""
    candidate: str
    """The command that splits the same work, with as many samples in a step of all its ranks."""
    steps: int = 3
    """Steps of the optimizer that are compared."""
    tolerance: float | None = None
    """The largest relative deviation that is right. By default 1e-5 in fp32, and what bf16 or fp16 can do."""
    own_data: bool = False
    """Let the candidate read its own data. By default it gets what the reference's DataLoader has given."""
    time_limit: int = 300
    """Seconds after which a program that has not made its steps is ended."""
    json: Path | None = None
    """File for the answer and its figures."""

    def __post_init__(self) -> None:
        check_range(self.steps, 1, 1000, "steps")
        check_range(self.tolerance, 1e-12, 1.0, "tolerance")
        check_range(self.time_limit, 1, 10**6, "time_limit")
        check_output_file(self.json, "--json", "cannot be written")


@dataclass(frozen=True)
class ProveRecipeOptions:
    """How many ranks, and how they are compared."""

    nproc: int = 2
    """Ranks of the recipe. The reference is `single`."""
    tolerance: float | None = None
    """The largest relative deviation that is right."""
    time_limit: int = 300
    """Seconds after which a run that has not made its steps is ended."""
    json: Path | None = None
    """File for the answer and its figures."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed(",".join(KEPT), lambda o: False, "a proof is a few steps and leaves no run"),
    )

    def __post_init__(self) -> None:
        check_range(self.nproc, 1, 64, "nproc")
        check_range(self.tolerance, 1e-12, 1.0, "tolerance")
        check_range(self.time_limit, 1, 10**6, "time_limit")
        check_output_file(self.json, "--json", "cannot be written")


def main(argv: Sequence[str]) -> int:
    """Compare two programs, or the recipe that the first word names with one process, and return 0 if they agree."""
    with tempfile.TemporaryDirectory(prefix="gptscale-prove-") as name:
        folder = Path(name)
        options = of_recipe(argv[0], argv[1:], folder) if argv and not argv[0].startswith("-") else None
        options = options or parse(ProveOptions, argv, prog="gptscale prove", about=ABOUT)
        try:
            comparison = prove(options, folder)
        except ProgramError as error:
            return print_error(error)
    print_answer(comparison)
    if options.json is not None:
        export(options.json, f"{json.dumps(as_json(comparison), indent=1)}\n".encode())
    return 1 if comparison.differences else 0


def prove(options: ProveOptions, folder: Path) -> Comparison:
    """Run both programs, and compare what they noted."""
    commands = {name: shlex.split(getattr(options, name)) for name in ("reference", "candidate")}
    for name, command in commands.items():
        if not command:
            raise ConfigError("no program", f"in --{name}", "write the command as you type it today")
    task = ProveTask(commands["reference"], options.steps, options.time_limit, options.own_data)
    with console(stderr=True).status("the reference"):
        reference = record(task, folder / "reference")
    if reference.world > 1:
        raise ConfigError(f"the reference has {reference.world} ranks", "in --reference", "let it be one process")
    task = dataclasses.replace(
        task, command=commands["candidate"], reference=reference.folder, without_cuda=reference.without_cuda
    )
    with console(stderr=True).status("the candidate"):
        candidate = record(task, folder / "candidate")
    return Comparison(reference, candidate, options.steps, options.tolerance)


def of_recipe(recipe: str, words: Sequence[str], folder: Path) -> ProveOptions:
    """Return the two commands that compare a recipe with one process."""
    config, recipe_config, own = parse_launch(recipe, words, ProveRecipeOptions, "prove")
    assert own is not None
    steps = 3 if config.steps == RunConfig().steps else config.steps
    config = dataclasses.replace(
        config,
        steps=steps,
        global_batch_size=config.global_batch_size or 4 * own.nproc,
        device="cpu",
        out=folder,
        tensorboard=False,
        verdict=False,
    )

    def command(name: str, ranks: int) -> str:
        settings = dataclasses.replace(config, run_name=f"{name}-{ranks}")
        chosen = recipe_config if name == recipe else default_recipe_config(name)
        launch = [sys.executable, "-m", "gptscale.launchers.cli", "run", name, "--nproc", str(ranks)]
        return shlex.join([*launch, *option_words(name, settings, chosen)])

    single, split = command("single", 1), command(recipe, own.nproc)
    return ProveOptions(single, split, steps, own.tolerance, True, own.time_limit, own.json)
