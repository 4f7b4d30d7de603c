"""`gptscale prove`: does a split program compute what one process computes? Tensor by tensor, on this CPU."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gptscale.common.errors import ConfigError
from gptscale.common.settings.command_line import parse
from gptscale.foresight.prove.answer import answer, show
from gptscale.foresight.prove.compare import GRADIENT, Proof
from gptscale.foresight.prove.options import ProveOptions, of_recipe
from gptscale.foresight.prove.program import ProveTask, record
from gptscale.foresight.simulate.processes import ProgramError, print_error
from gptscale.results.record.files import export

ABOUT = "Two commands that train the same model: do they compute the same, tensor by tensor?"


def main(argv: Sequence[str]) -> int:
    """Compare two programs, or the recipe that the first word names with one process, and return 0 if they agree."""
    with tempfile.TemporaryDirectory(prefix="gptscale-prove-") as name:
        options = of_recipe(argv[0], argv[1:], Path(name)) if argv and not argv[0].startswith("-") else None
        options = options or parse(ProveOptions, argv, prog="gptscale prove", about=ABOUT)
        try:
            facts = answer(prove(options, Path(name)))
        except ProgramError as error:
            return print_error(error)
    show(facts)
    if options.json is not None:
        export(options.json, f"{json.dumps(facts, indent=1)}\n".encode())
    return 0 if facts["right"] else 1


def prove(options: ProveOptions, folder: Path) -> Proof:
    """Run both programs, and compare what they noted."""
    commands = [shlex.split(options.reference), shlex.split(options.candidate)]
    if not all(commands):
        raise ConfigError("no program", "in --reference or --candidate", "write the command as you type it today")
    task = ProveTask(commands[0], options.steps, options.time_limit, options.own_data)
    reference = record(task, folder / "reference")
    if reference.world > 1:
        raise ConfigError(f"the reference has {reference.world} ranks", "in --reference", "let it be one process")
    task = dataclasses.replace(task, command=commands[1], reference=reference.folder)
    candidate = record(dataclasses.replace(task, without_cuda=reference.without_cuda), folder / "candidate")
    proof = Proof(reference, candidate, options.steps, options.tolerance)
    largest = float(np.max([proof.wholes(reference, GRADIENT, step).largest for step in range(1, options.steps + 1)]))
    if not 0 < largest < math.inf:
        # Such as the cross entropy of a single class, or weights that nobody has initialized.
        what = f"the largest gradient of the reference is {largest:g}"
        raise ConfigError(
            what, "in --reference", "look at its loss and its first weights: no split of it can be judged"
        )
    return proof
