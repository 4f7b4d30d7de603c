"""How far are the closed forms of memory off? Beside them stands what a rank allocates under the mock of CUDA.

python -m benchmarks.foresight.memory [--recipes A,B] [--shapes models|worlds] [--csv FILE]
python -m benchmarks.foresight.memory --programs FILE

The second command sets programs of others beside what their authors published. FILE is a CSV with a row for each: what, folder
(of the checkout), options and command (of `gptscale simulate options -- command`), figure (allocated or reserved), and gib.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from benchmarks.measurement import print_written, write_csv
from gptscale.common.errors import ConfigError, DataError, GptscaleError
from gptscale.common.measure.gpus import GIB
from gptscale.common.process.world import World
from gptscale.common.settings.checks import check_output_file, parse_names
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.gpt_config import PRESETS
from gptscale.common.settings.needs import OptionNeed
from gptscale.common.settings.user_file import read_rows
from gptscale.foresight.memory.closed_form import predict
from gptscale.foresight.mock_cuda.devices import device_named
from gptscale.foresight.simulate.own_program import ProgramOptions
from gptscale.foresight.simulate.simulation import LIMIT_S, simulate
from gptscale.launchers.cli import start
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import resolve
from gptscale.recipes import RECIPES, get
from gptscale.results import render

# Colossal-AI's torch has no kernels for a B200: its attention would be that which keeps all scores.
DEVICE, OLDER_DEVICE, RANKS_PER_NODE = "b200", "h200", 8
FILE_BYTES_MAX = 2**26


class Shape(NamedTuple):
    """A model, the processes of its world, the rank, and further options."""

    model: str
    nproc: int
    rank: int
    words: str


# Models from 125M to 13B.
MODELS = (
    Shape("gpt2", 1, 0, "--micro-batch-size 8"),
    Shape("gpt2", 2, 1, "--micro-batch-size 16 --activation-checkpointing full"),
    Shape("gpt2", 4, 0, "--micro-batch-size 8 --grad-accum-steps 4"),
    Shape("gpt2-medium", 4, 3, "--micro-batch-size 8 --seq-len 512"),
    Shape("gpt2-medium", 8, 0, "--micro-batch-size 4 --precision fp32"),
    Shape("gpt2-large", 8, 7, "--micro-batch-size 4 --activation-checkpointing selective"),
    Shape("gpt2-large", 16, 0, "--micro-batch-size 4 --vocab-size 100000"),
    Shape("1.6b", 8, 0, "--micro-batch-size 8"),
    Shape("1.6b", 16, 15, "--micro-batch-size 4 --grad-accum-steps 2"),
    Shape("1.6b", 64, 0, "--micro-batch-size 8 --activation-checkpointing full"),
    Shape("gpt3-2.7b", 16, 0, "--micro-batch-size 4"),
    Shape("gpt3-6.7b", 32, 0, "--micro-batch-size 2 --activation-checkpointing full"),
    Shape("gpt3-13b", 64, 63, "--micro-batch-size 1 --activation-checkpointing full"),
)
# One model on a node and on eight, the first and the last rank. Its 25 heads could not be cut over 8 tensor ranks.
WORLDS = tuple(
    Shape("1.6b", nproc, rank, "--n-head 32 --micro-batch-size 4") for nproc in (8, 64) for rank in (0, nproc - 1)
)
SHAPES = {"models": MODELS, "worlds": WORLDS}
# Stages that a pipeline has at most, because each takes a micro-batch and a simulation of many takes long.
MOST_STAGES = {"models": 8, "worlds": 16}
WAYS = {"hybrid_3d": "--tp-size 2 --pp-size 2", "colossal_tensor": "--tp-size 2", "colossal_pipeline": "--pp-size 2"}
# The smallest world that has a rank for each place of these ways.
SMALLEST = {"hybrid_3d": 4, "colossal_tensor": 2, "colossal_pipeline": 2}
STAGES = {"hybrid_3d": 2, "colossal_pipeline": 2}
# Columns that tell one row from the others.
KEY = ("recipe", "nproc", "rank", "options")
PROGRAM = ("what", "folder", "options", "command", "figure", "gib")
REFUSED = "refused: "
Rows = dict[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True)
class MemoryAccuracyOptions:
    """Which recipes and worlds to compare, and where to write the rows."""

    recipes: str = "all"
    """Recipes with commas between, or all."""
    shapes: Literal["models", "worlds"] = "models"
    """models: 125M to 13B on 1 to 64 GPUs | worlds: 1.6b on 8 and on 64, the first and the last rank."""
    csv: Path | None = None
    """A row for each recipe, world, shape and rank. The rows that it has already are not simulated again."""
    programs: Path | None = None
    """A CSV of programs of others and what they published, to simulate instead."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed("recipes,shapes,csv", lambda o: o.programs is None, "--programs brings its own rows"),
    )

    def __post_init__(self) -> None:
        if self.recipes != "all":
            parse_names(self.recipes, RECIPES, "recipe", "--recipes")
        check_output_file(self.csv, "--csv", "cannot be written")


def main(argv: Sequence[str]) -> int:
    """Simulate and reckon, print the errors of each recipe, and return 1 if a shape failed under the mock."""
    about = "Closed forms of memory beside what ranks allocate under the mock of CUDA."
    options = parse(MemoryAccuracyOptions, argv, prog="python -m benchmarks.foresight.memory", about=about)
    if options.programs is not None:
        return _compare_programs(options.programs)
    import pandas as pd

    names = [name for name, row in RECIPES.items() if not row.own_work]
    rows_by_case = rows_in(options.csv)
    table = render.table(("recipe", "rows", "closed form (median / worst)"), left=("recipe",))
    rows: list[dict[str, Any]] = []
    for recipe in names if options.recipes == "all" else options.recipes.split(","):
        mine = []
        for row in compare_on_mock(recipe, options.shapes, rows_by_case):
            mine.append(row)
            write_csv(pd.DataFrame(list(rows_by_case.values())), options.csv)
            if row["failure"]:
                print(f"  {recipe} on {row['nproc']}, {row['options']}: {row['failure']}", flush=True)
        rows += mine
        table.add_row(recipe, str(len(mine)), _errors(mine))
        print(f"{recipe}: {len(mine)} comparisons, {_errors(mine)}", flush=True)
    table.add_row("all", str(len(rows)), _errors(rows))
    render.console(120, highlight=False).print(table)
    print_written(options.csv)
    return int(any(row["failure"] and not row["failure"].startswith(REFUSED) for row in rows))


def _compare_programs(file: Path) -> int:
    """Print a line for each program of others, and return 1 if one did not make its steps."""

    def refuse(reason: str) -> DataError:
        return DataError(
            f"{file} has no programs ({reason})", "in --programs", "see python -m benchmarks.foresight.memory"
        )

    failed = 0
    for row in read_rows(file, FILE_BYTES_MAX, refuse, PROGRAM):
        options = parse(ProgramOptions, shlex.split(row["options"]), prog="options")
        try:
            simulation = options.simulate(shlex.split(row["command"]), options.rank, Path(row["folder"]))
        except GptscaleError as error:
            failed += 1
            print(f"{row['what']}: {error}", flush=True)
            continue
        simulated, published = getattr(simulation.memory(), row["figure"]) / GIB, float(row["gib"])
        print(
            f"{row['what']}: {row['figure']} {published:.2f} GiB published, {simulated:.2f} simulated, "
            f"{simulated / published - 1:+.1%}, torch {simulation.facts['torch']}",
            flush=True,
        )
    return int(failed > 0)


def _errors(rows: Sequence[dict[str, Any]]) -> str:
    errors = [abs(e) for row in rows if (e := row["closed_form_error"]) is not None and e == e]
    return f"{statistics.median(errors):.2%} / {max(errors):.2%}" if errors else "none"


def cases(recipe: str, which: str) -> list[dict[str, Any]]:
    """Return the recipe, processes, rank and options of each comparison of a recipe that makes sense for it."""
    distinct = []
    for model, nproc, rank, words in SHAPES[which]:
        size = world_size(recipe, model, nproc, MOST_STAGES[which])
        if stages := STAGES.get(recipe, size if recipe == "pipeline" else 0):
            # as many micro-batches as stages, or 1F1B refuses
            words = f"{words.partition(' --grad-accum-steps')[0]} --grad-accum-steps {stages}"
        if get(recipe).engine == "colossalai":
            # It recomputes whole blocks only.
            words = words.replace("selective", "full")
        line = f"--model {model} --precision bf16 --data synthetic {words} {WAYS.get(recipe, '')}"
        # The last rank of a world stays the last of a smaller or larger one.
        rank = size - 1 if rank == nproc - 1 and nproc > 1 else min(rank, size - 1)
        case = {"recipe": recipe, "nproc": size, "rank": rank, "options": " ".join(line.split())}
        if case not in distinct:
            distinct.append(case)
    return distinct


def world_size(recipe: str, model: str, nproc: int, most_stages: int) -> int:
    """Return how many of `nproc` processes a recipe can use, or the least that it needs.

    A world of one axis is no larger than what the axis divides: heads of tensor ranks, blocks of stages.
    """
    axes, gpt = get(recipe).axes, PRESETS[model]
    if not axes:
        return 1
    if recipe == "tensor_parallel":
        return next(size for size in (64, 32, 16, 8, 4, 2, 1) if size <= nproc and gpt.n_head % size == 0)
    if recipe == "pipeline":
        return min(nproc, most_stages)
    return max(nproc, SMALLEST.get(recipe, 1))


def compare_on_mock(recipe: str, which: str, rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape, and keep it in `rows`.

    A shape that succeeded before is not simulated again. Its closed form is reckoned anew.
    """
    for case in cases(recipe, which):
        key = _key(case)
        if key not in rows or rows[key]["failure"]:
            rows[key] = _simulated(case)
        if rows[key]["allocated"]:
            rows[key] |= _closed_form(case, int(float(rows[key]["allocated"])))
        yield rows[key]


def rows_in(csv: Path | None) -> Rows:
    """Return the rows that an earlier run left in a file. Errors are numbers, the rest are words."""
    if csv is None or not csv.exists():
        return {}

    def refuse(reason: str) -> DataError:
        return DataError(f"{csv} has no rows of this bench ({reason})", "in --csv", "give the file that it wrote")

    rows = read_rows(csv, FILE_BYTES_MAX, refuse, (*KEY, "closed_form_error"))
    try:
        return {_key(row): row | {"closed_form_error": float(row["closed_form_error"] or "nan")} for row in rows}
    except ValueError as error:
        raise refuse(str(error)[:100]) from None


def _device(recipe: str) -> str:
    return OLDER_DEVICE if get(recipe).environment else DEVICE


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def _simulated(case: dict[str, Any]) -> dict[str, Any]:
    """Return a row with what the rank allocates under the mock, or with the reason why that could not be simulated."""
    row = case | dict.fromkeys(("allocated", "reserved", "closed_form", "closed_form_error"))
    row |= {"failure": "", "by_owner": "", "closed_form_by_owner": ""}
    try:
        config, recipe_config = parse_run(case["recipe"], case["options"].split())
        simulation = simulate(
            case["recipe"],
            config,
            recipe_config,
            device=_device(case["recipe"]),
            rank=case["rank"],
            world_size=case["nproc"],
            ranks_per_node=RANKS_PER_NODE,
        )
    except GptscaleError as error:
        return row | {"failure": f"{REFUSED if isinstance(error, ConfigError) else ''}{error}"}
    if simulation.out_of_memory:
        return row | {"failure": simulation.out_of_memory}
    memory, timeline = simulation.memory(), simulation.timeline
    by_owner = {"in": timeline.part_at(timeline.peak_at), **timeline.by_owner(timeline.peak_at)}
    return row | {"allocated": memory.allocated, "reserved": memory.reserved, "by_owner": json.dumps(by_owner)}


def _closed_form(case: dict[str, Any], allocated: int) -> dict[str, Any]:
    config, recipe_config = parse_run(case["recipe"], case["options"].split())
    world = World(case["rank"], case["rank"] % RANKS_PER_NODE, case["nproc"], torch.device("cuda", 0), LIMIT_S)
    capability = device_named(_device(case["recipe"])).capability[0]
    owners = predict(resolve(case["recipe"], config, recipe_config, world), recipe_config, capability)
    total = sum(owners.values())
    return {
        "closed_form": total,
        "closed_form_error": total / allocated - 1,
        "closed_form_by_owner": json.dumps(owners),
    }


if __name__ == "__main__":
    sys.exit(start(main))
