"""The worst deviation of every recipe that runs here from one process, tensor by tensor, as a table.

    python -m benchmarks.foresight.prove_recipes [--models tiny,llama-tiny] [--ranks 2,4] [--recipes all] [--csv FILE]

It is `gptscale prove RECIPE --model X` for each way in which each recipe splits the work. The reference of a model runs once.
"""

from __future__ import annotations

import csv
import dataclasses
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptscale.common.errors import GptscaleError
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.families import MODELS
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.prove.answer import answer
from gptscale.foresight.prove.compare import GRADIENT, Proof
from gptscale.foresight.prove.options import of_recipe
from gptscale.foresight.prove.program import ProveTask, Recording, record
from gptscale.launchers.cli import start
from gptscale.launchers.run.options import default_recipe_config
from gptscale.launchers.run.start import recipes_named

# Under AdamW gradients of mere rounding become whole steps, so it is SGD.
WORDS = "--seq-len 16 --global-batch-size 16 --optimizer sgd --lr 0.1 --clip-grad-norm 0.5"
# Enough blocks of a preset for two stages on each of four ranks.
BLOCKS = " --n-layer 8"
COLUMNS = ("model", "ranks", "recipe", "gradient", "update", "answer")


@dataclass(frozen=True)
class RecipeProofOptions:
    """Which recipes, on which models and ranks."""

    models: str = "tiny,llama-tiny"
    """Presets with commas between, or hf:FOLDER."""
    ranks: str = "2,4"
    """Numbers of ranks with commas between."""
    recipes: str = "all"
    """Names with commas between, or all that can run on this machine's CPU."""
    ways: int = 99
    """How many of its ways to split the work, from the last."""
    time_limit: int = 300
    """Seconds for each program."""
    csv: Path | None = None
    """File for the rows."""


def rows(options: RecipeProofOptions, folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield a row for each way of each recipe: what it is, its worst gradient and update, and the answer."""
    names = [n for n in recipes_named(options.recipes, RunConfig(device="cpu")) if n != "single"]
    for model in options.models.split(","):
        (within := folder / Path(model).name).mkdir()
        references: dict[str, Recording] = {}
        for ranks in map(int, options.ranks.split(",")):
            ways = [(n, way) for n in names for way in default_recipe_config(n).ways(ranks)[-options.ways :]]
            for number, (name, way) in enumerate(ways):
                said, worst = "", dict[str, float]()
                try:
                    words = f"{WORDS}{BLOCKS * (model in MODELS)} --model {model} --nproc {ranks}".split()
                    task = of_recipe(name, [*words, *way], within)
                    one = ProveTask(shlex.split(task.reference), task.steps, options.time_limit, own_data=True)
                    if task.reference not in references:
                        references[task.reference] = record(one, within / f"reference-{len(references)}")
                    reference = references[task.reference]
                    own = task.candidate.replace(f" {name}-{ranks} ", f" {name}-{ranks}-{number} ")
                    split = dataclasses.replace(one, command=shlex.split(own), reference=reference.folder)
                    proof = Proof(reference, record(split, within / f"{ranks}-{number}"), task.steps, None)
                    facts, worst = answer(proof), proof.worst
                    first = facts["first"]
                    said = f"**wrong**: {first['kind']} of {first['name']}, {first['cause']}" if first else "right"
                except GptscaleError as error:
                    said = f"not compared: {error}".replace("|", "/")
                shown = [f"{worst[kind]:.1e}" if kind in worst else "" for kind in (GRADIENT, "update")]
                yield (model, str(ranks), f"{name} {' '.join(way)}".strip(), *shown, said)


def main(argv: Sequence[str]) -> int:
    """Print the table, a row as soon as it is known, and return 1 if one is not right."""
    options = parse(RecipeProofOptions, argv, prog="python -m benchmarks.foresight.prove_recipes")
    print(f"| {' | '.join(COLUMNS)} |\n" + "| --- " * 6 + "|")
    right, shown = True, list[tuple[str, ...]]([COLUMNS])
    with tempfile.TemporaryDirectory(prefix="gptscale-recipes-") as temporary:
        for row in rows(options, Path(temporary)):
            right &= row[-1] == "right"
            print(f"| {' | '.join(row)} |", flush=True)
            shown.append(row)
            if options.csv:
                with options.csv.open("w", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows(shown)
    return int(not right)


if __name__ == "__main__":
    sys.exit(start(main))
