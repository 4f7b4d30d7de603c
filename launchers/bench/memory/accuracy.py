"""The command `gptscale bench simulate`: predicted bytes beside those that real worlds, or ranks of the mock, allocate.

For each recipe that runs here, worlds of 2 and 4 processes train shapes that differ in one thing each, and every byte that a
rank allocates is counted (foresight/memory/counter.py). Beside it stand the peak of the same rank of a world that was not
started, the peak by the closed form, and the bytes of state by the closed form, which must be exact. In a world a thread of
gloo lets go of some buffers late, by chance. So the peak of the middle one of five steps is compared, and the highest too.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.common.settings.checks import check_output_file, parse_names, refuse_changed
from gptscale.common.settings.command_line import parse
from gptscale.foresight.tables.megatron_memory import between_machines, read_held, table_of
from gptscale.launchers.bench.measurement import print_written, write_csv
from gptscale.recipes import RECIPES, get
from gptscale.results import render

BASE = "--n-layer 4 --n-head 4 --n-embd 64 --seq-len 64 --global-batch-size 8"
# What differs from BASE: width, depth, batch, sequence, vocabulary, checkpointing, accumulation, precision, optimizer.
SHAPES = (
    "",
    "--n-embd 160 --n-head 8",
    "--n-embd 256 --vocab-size 1000",
    "--n-layer 7",
    "--global-batch-size 32",
    "--seq-len 160",
    "--vocab-size 6000",
    "--activation-checkpointing full --n-embd 128",
    "--activation-checkpointing selective --n-embd 128",
    "--global-batch-size 16 --grad-accum-steps 4",
    "--precision bf16 --n-embd 32 --seq-len 32",
    "--optimizer sgd",
    "--dropout 0.1 --n-embd 96",
    "--optimizer-state 8bit --n-embd 128",
)
# A pipeline of 4 processes with 2 stages each needs 7 blocks.
OF_WAYS = "--n-layer 8 --global-batch-size 32"


@dataclass(frozen=True)
class AccuracyOptions:
    """Which recipes and worlds to compare, and where to write the rows."""

    recipes: str = "all"
    """Recipes with commas between, or all that run here."""
    nproc: str = "2,4"
    """Sizes of the worlds, with commas between."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cpu: worlds that run here | cuda: the closed forms for GPUs beside the allocator under the mock of CUDA."""
    shapes: Literal["models", "worlds"] = "models"
    """with --device cuda, models: 125M to 13B on 1 to 64 GPUs | worlds: 1.6b on 8 and on 64, the first and the last rank."""
    csv: Path | None = None
    """A row for each recipe, world, shape and rank. With --device cuda the rows that it has already are not made again."""
    check: Path | None = None
    """Nothing is simulated: a CSV of Megatron-LM's golden values, and what its tests hold beyond the formula of state."""

    def __post_init__(self) -> None:
        if self.recipes != "all":
            parse_names(self.recipes, RECIPES, "recipe", "--recipes")
        if not all(word.isdecimal() and 0 < int(word) <= 64 for word in self.nproc.split(",")):
            raise ConfigError(f"{self.nproc!r} is no list of sizes", "in --nproc", "use for example 2,4")
        check_output_file(self.csv, "--csv", "cannot be written")
        if self.check is not None:
            refuse_changed(self, ("recipes", "nproc", "device", "shapes", "csv"), "--check simulates nothing")


def main(argv: Sequence[str]) -> int:
    """Count and predict, print the errors of each recipe, and return 1 if a recipe could not be compared."""
    options = parse(AccuracyOptions, argv, prog="gptscale bench simulate", about="Predicted bytes beside counted ones.")
    if options.check is not None:
        return check_table(options.check)
    # After the options are parsed, because they import torch and pandas.
    import pandas as pd

    from gptscale.launchers.run.preflight import why_not_here

    names = [name for name, row in RECIPES.items() if not row.own_work]
    names = names if options.recipes == "all" else options.recipes.split(",")
    if options.device == "cuda":
        return _on_mock(names, options)
    rows: list[dict[str, Any]] = []
    failures = []
    for recipe in names:
        if reason := why_not_here(recipe, cuda=False):
            print(f"leaving out {recipe}: {reason}", flush=True)
            continue
        for nproc in [int(word) for word in options.nproc.split(",")] if get(recipe).axes else [1]:
            try:
                rows += compare(recipe, nproc)
            except GptscaleError as error:
                print(f"{recipe} on {nproc}: {error}", flush=True)
                failures.append(recipe)
        write_csv(pd.DataFrame(rows), options.csv)
        mine = [row for row in rows if row["recipe"] == recipe]
        print(f"{recipe}: {len(mine)} comparisons, {_errors(mine, 'error')}", flush=True)
    show(rows)
    print_written(options.csv)
    return int(bool(failures))


def check_table(path: Path) -> int:
    """Print what each split of a table holds beyond the formula of state, and what explains the machines' differences."""
    splits = read_held(path)
    render.console(120, highlight=False).print(table_of(splits))
    for line in between_machines(splits):
        print(line)
    return 0


def _on_mock(names: Sequence[str], options: AccuracyOptions) -> int:
    """Set the closed forms beside what ranks allocate under the mock of CUDA, and return 1 if a shape failed there."""
    import pandas as pd

    from gptscale.launchers.bench.memory.accuracy_cuda import REFUSED, compare_on_mock, rows_in

    rows_by_case = rows_in(options.csv)
    table = render.table(("recipe", "rows", "closed form (median / worst)"), left=("recipe",))
    rows: list[dict[str, Any]] = []
    for recipe in names:
        mine = []
        for row in compare_on_mock(recipe, options.shapes, rows_by_case):
            mine.append(row)
            write_csv(pd.DataFrame(list(rows_by_case.values())), options.csv)
            if row["failure"]:
                print(f"  {recipe} on {row['nproc']}, {row['options']}: {row['failure']}", flush=True)
        rows += mine
        errors = _errors(mine, "closed_form_error")
        print(f"{recipe}: {len(mine)} comparisons, {errors}", flush=True)
        table.add_row(recipe, str(len(mine)), errors)
    table.add_row("all", str(len(rows)), _errors(rows, "closed_form_error"))
    render.console(120, highlight=False).print(table)
    print_written(options.csv)
    return int(any(row["failure"] and not row["failure"].startswith(REFUSED) for row in rows))


def compare(recipe: str, nproc: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape, and for rank 0 and the last rank of the world."""
    from gptscale.common.process.program import Program
    from gptscale.common.process.ranks import launch
    from gptscale.common.process.warm_parent import run_captured
    from gptscale.foresight.simulate.simulated_cpu import of_closed_form

    cases = [(recipe, words) for words in shapes(recipe, nproc)]
    row = get(recipe)
    with tempfile.TemporaryDirectory() as folder:

        def program(kind: str) -> Program:
            words = (folder, kind, json.dumps(cases))
            return Program("gptscale.launchers.bench.memory.counted", words, row.environment, imports=row.imports)

        if status := launch(program("real"), nproc, environment={"OMP_NUM_THREADS": "1"}):
            raise GptscaleError(f"the world of {recipe} ended with status {status}", "in this comparison", "see above")
        for rank in dict.fromkeys((0, nproc - 1)):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
            environ = {**os.environ, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in variables.items()}}
            ended = run_captured(program("fake"), timeout=1800, environ=environ)
            for number, (_, words) in enumerate(cases):
                counted, alone = (_read(Path(folder), kind, number, rank) for kind in ("real", "fake"))
                formula = of_closed_form(recipe, words, nproc, rank)
                yield _row(recipe, nproc, rank, words, counted, alone, formula)
            if ended.returncode:
                print(
                    f"  the lone rank {rank} of {nproc} failed: {ended.stderr.strip().splitlines()[-1][:200]}",
                    flush=True,
                )


def shapes(recipe: str, nproc: int) -> list[list[str]]:
    """Return the options of each comparison: SHAPES as far as the recipe takes them, and its own ways to split."""
    from gptscale.foresight.simulate.simulated_cpu import planned_words
    from gptscale.launchers.run.options import default_recipe_config

    ways = [" ".join((OF_WAYS, *way)) for way in default_recipe_config(recipe).ways(nproc) if way]
    fitting = []
    for words in [f"{BASE} {shape}".split() for shape in (*SHAPES, *ways)]:
        try:
            planned_words(recipe, words, nproc, 0)
        except ConfigError:
            continue
        fitting.append(words)
    return fitting


def _read(folder: Path, kind: str, number: int, rank: int) -> dict[str, Any] | None:
    path = folder / f"{kind}-{number}-{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _row(
    recipe: str,
    nproc: int,
    rank: int,
    words: list[str],
    counted: dict[str, Any] | None,
    alone: dict[str, Any] | None,
    formula: tuple[int, int],
) -> dict[str, Any]:
    assert counted is not None
    real, state = counted["usual_peak"], counted["parameters"] + counted["optimizer_state"]
    peak, formula_state = formula
    return {
        "recipe": recipe,
        "nproc": nproc,
        "rank": rank,
        "options": " ".join(words),
        "counted": real,
        "counted_most": counted["peak"],
        "predicted": alone and alone["peak"],
        "error": alone and alone["peak"] / real - 1,
        "error_of_most": alone and alone["peak"] / counted["peak"] - 1,
        "closed_form": peak,
        "closed_form_error": peak / real - 1,
        "state_counted": state,
        "state_closed_form": formula_state,
        "state_error": formula_state - state,
        "peak_by_owner": json.dumps(counted["peak_by_owner"]),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the errors of each recipe and of all together."""
    titles = ("recipe", "rows", "peak (median / worst)", "of the highest step", "closed form", "state exact")
    table = render.table(titles, left=("recipe",))
    for recipe in [*dict.fromkeys(row["recipe"] for row in rows), "all"]:
        mine = [row for row in rows if recipe in (row["recipe"], "all")]
        exact = sum(not row["state_error"] for row in mine)
        errors = (_errors(mine, name) for name in ("error", "error_of_most", "closed_form_error"))
        table.add_row(recipe, str(len(mine)), *errors, f"{exact} of {len(mine)}")
    render.console(120, highlight=False).print(table)


def _errors(rows: Sequence[dict[str, Any]], name: str) -> str:
    errors = [abs(row[name]) for row in rows if row[name] is not None and row[name] == row[name]]
    return f"{statistics.median(errors):.2%} / {max(errors):.2%}" if errors else "none"
