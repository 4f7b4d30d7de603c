"""The file of a plan: its rows with the options that start them, under a hash, so that a run can be compared with its row."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gptscale.common.errors import ConfigError, DataError
from gptscale.common.settings.checks import OF_THE_MACHINE
from gptscale.common.settings.own_config import OwnConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import AXIS_SIZES, SPLIT
from gptscale.common.settings.user_file import read_json

FORMAT_VERSION = 1
FILE_BYTES_MAX = 2**24
# A prediction holds for these options. Data, seed, steps, rates and what a run leaves behind are free.
PLANNED = (*SPLIT, "seq_len", "precision", "optimizer", "optimizer_state", "dropout")


class FrozenRow(NamedTuple):
    """A row of a saved plan. options: what the run must have. words: the command line behind the recipe."""

    recipe: str
    nodes: int
    ranks: int
    words: list[str]
    options: dict[str, str]
    predicted_step_time_s: float | None
    predicted_peak_mem_gib: float
    plan_hash: str


def options_of(run: Run, config: Any) -> dict[str, str]:
    """Return all that a prediction of a run depends on, by name. config: its recipe's own options."""
    facts: dict[str, Any] = {"recipe": run.recipe, "ranks": run.world.world_size}
    facts |= {name: getattr(run.config, name) for name in PLANNED}
    facts |= {"seq_len": run.seq_len, **{name: getattr(run, name) for name in AXIS_SIZES}}
    facts |= {name: getattr(run.batch, name) for name in ("global_batch_size", "micro_batch_size", "grad_accum_steps")}
    facts |= {name: getattr(run.gpt, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    # A file of one's own may have changed.
    facts |= {"model": run.gpt.identity} if isinstance(run.gpt, OwnConfig) else {}
    own = dataclasses.asdict(config).items()
    facts |= {name: value for name, value in own if name not in OF_THE_MACHINE}
    return {name: str(value) for name, value in facts.items()}


def read_row(path: Path, number: int | None = None) -> FrozenRow:
    """Return a row of a saved plan.

    number: as the plan's table counts, from 1; None is the recommended one. Raises DataError for a file that was edited, that is
    of another version, or that is no plan, and ConfigError for a row that it does not have.
    """
    where, anew = f"in {path}", "make it anew: gptscale plan ... --save FILE"

    def refuse(reason: str) -> DataError:
        return DataError(f"this is no plan ({reason})", where, "give a file of gptscale plan --save")

    content = read_json(path, FILE_BYTES_MAX, refuse)
    try:
        version, recorded_hash = content["format"], content.pop("sha256")
        if version != FORMAT_VERSION:
            what = f"the plan has format {version}, this gptscale reads {FORMAT_VERSION}"
            raise DataError(what, where, anew)
        if recorded_hash != hash_of(content):
            raise DataError("the plan was changed after it was saved: its hash does not hold", where, anew)
        rows, recommended = content["rows"], content["recommended"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise refuse(type(error).__name__) from None
    number = number or recommended
    if not 1 <= number <= len(rows):
        raise ConfigError(f"the plan has no row {number}", "in --plan-row", f"use 1 to {len(rows)}")
    row = rows[number - 1]
    return FrozenRow(**{name: row[name] for name in FrozenRow._fields[:-1]}, plan_hash=recorded_hash[:16])


def check_planned(run: Run, config: Any, path: Path, number: int | None) -> None:
    """Raise ConfigError unless a run is what a row of a plan predicts."""
    row, own = read_row(path, number), options_of(run, config)
    planned = row.options.items()
    if different := [f"{n} {own.get(n)} here, {value} there" for n, value in planned if own.get(n) != value]:
        fix = f"leave it out, or start with: gptscale run --plan {path}"
        raise ConfigError(f"the run is not what the plan predicts: {'; '.join(different[:4])}", "in --plan", fix)


def predicted_columns(path: Path, number: int | None) -> dict[str, Any]:
    """Return the columns of a run's row that its plan fills."""
    row = read_row(path, number)
    names = ("predicted_step_time_s", "predicted_peak_mem_gib", "plan_hash")
    return {name: getattr(row, name) for name in names}


def hash_of(content: Mapping[str, Any]) -> str:
    """Return the hash under which a plan is kept."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
