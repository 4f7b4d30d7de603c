"""Ratios that the bench of the model must reach, as `make bench-check` asks: ratios travel between machines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gptscale.common.errors import ConfigError
from gptscale.common.settings.user_file import finite, read_rows

FILE_BYTES_MAX = 2**20
SHARES = ("share_of_gemm_rate", "share_of_mm_rate", "gemm_time_over_step_time", "share_of_roofline")


class Floor(NamedTuple):
    """A ratio that must be reached."""

    name: str
    least: float


def read_floors(path: Path, names: Sequence[str]) -> list[Floor]:
    """Return the rows of a CSV with columns `name` and `floor`.

    ConfigError unless each is a ratio that is measured of the contenders `names`.
    """
    measured = [*SHARES, *(f"over_{name}" for name in names)]

    def refuse(reason: str) -> ConfigError:
        what = f"{path} is no CSV with columns name and floor ({reason})"
        return ConfigError(what, "in --floors", "see docs/measurements/bench_model.md")

    try:
        cells = read_rows(path, FILE_BYTES_MAX, refuse, ("name", "floor"))
        rows = [Floor(row["name"], finite(row["floor"])) for row in cells]
    except ValueError as error:
        raise refuse(str(error)[:100]) from None
    for row in rows:
        if row.name not in measured:
            raise ConfigError(f"no ratio {row.name!r} is measured", f"in {path}", "use one of: " + " ".join(measured))
    return rows


def check_floors(ratios: Mapping[str, float], floors: Sequence[Floor]) -> int:
    """Print how each ratio stands, and return exit status 1 if one misses its floor or its contender failed."""
    status = 0
    for name, least in floors:
        ratio = ratios.get(name, math.nan)
        verdict = "reached"
        # a comparison with NaN is false
        if not ratio >= least:
            verdict, status = "NOT REACHED", 1
        print(f"{name} {ratio:.3f}, floor {least:.3f}: {verdict}")
    return status
