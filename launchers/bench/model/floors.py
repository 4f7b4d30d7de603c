"""Ratios that `gptscale bench model --floors` must reach: `make bench-check`. Ratios travel between machines, seconds do not."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gptscale.common.errors import ConfigError

SHARES = ("share_of_gemm_rate", "share_of_mm_rate", "gemm_time_over_step_time", "share_of_roofline")


class Floor(NamedTuple):
    """A ratio that must be reached."""

    name: str
    least: float


def read_floors(path: Path, names: Sequence[str]) -> list[Floor]:
    """The rows of a CSV with columns `name` and `floor`; ConfigError unless each is a ratio of one of the contenders `names`."""
    known = [*SHARES, *(f"over_{name}" for name in names)]
    try:
        with path.open(newline="") as file:
            rows = [Floor(row["name"], float(row["floor"])) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        what = f"{path} is no CSV with columns name and floor ({type(error).__name__})"
        raise ConfigError(what, "in --floors", "see docs/measurements/bench_model.md") from None
    for row in rows:
        if row.name not in known:
            raise ConfigError(f"no ratio {row.name!r} is measured", f"in {path}", "use one of: " + " ".join(known))
    return rows


def check_floors(found: Mapping[str, float], wanted: Sequence[Floor]) -> int:
    """Say how each stands; exit status 1 if one is not reached, or not there because its contender failed."""
    missed = 0
    for name, least in wanted:
        ratio = found.get(name, math.nan)
        reached = ratio >= least
        missed += not reached
        print(f"{name} {ratio:.3f}, floor {least:.3f}: {'reached' if reached else 'NOT REACHED'}")
    return int(missed > 0)
