"""Read the files of a run's folder, whatever lies there: what is damaged is told in a few words, and no link is followed."""

from __future__ import annotations

import json
import math
import os
import shlex
import stat
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from gptscale.common.errors import visible
from gptscale.common.settings.checks import RUN_NAME
from gptscale.common.settings.run import todays_workload, workload_hash
from gptscale.results.render import SHARES

if TYPE_CHECKING:
    import pandas as pd

# Bounds of what is read from files that anyone may have written, far above what a run writes.
VERDICT_BYTES_MAX = 2**26
LINE_BYTES_MAX, TEXT_MAX, RUN_JSON_BYTES_MAX, NUMBER_MAX = 2**16, 300, 2**20, 1e18


class DamagedFileError(Exception):
    """A file of a run that cannot be read, with the reason in a few words."""


@dataclass(frozen=True)
class RunStart:
    """What run.json says of a run, its work as today's version records it.

    damage: why it says nothing, empty if it is whole or not there.
    """

    workload: dict[str, Any] | None = None
    workload_hash: str = ""
    recipe_options: str = ""
    command: str = ""
    environment: str = ""
    damage: str = ""


@contextmanager
def run_file(folder: str, run_id: str, name: str) -> Iterator[IO[bytes]]:
    """Open a file of a run for reading, which no link or name leads out of the results folder.

    Raises FileNotFoundError if it is gone, and DamagedFileError if it is no file or lies behind a link.
    """
    if not RUN_NAME.fullmatch(run_id):
        raise DamagedFileError(f"{run_id!r} is no name of a run")
    place, flags = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        for part in ("runs", run_id, name):
            outer, place = place, os.open(part, flags | (0 if part == name else os.O_DIRECTORY), dir_fd=place)
            os.close(outer)
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise DamagedFileError("it is no file")
        with open(place, "rb", closefd=False) as file:
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFileError(f"it cannot be opened, or is a link ({error.strerror})") from None
    finally:
        os.close(place)


def read_run_json(folder: str, run_id: str) -> RunStart:
    """Read what a run wrote when it started."""
    try:
        with run_file(folder, run_id, "run.json") as file:
            content = file.read(RUN_JSON_BYTES_MAX + 1)
        if len(content) > RUN_JSON_BYTES_MAX:
            raise DamagedFileError(f"it has more than {RUN_JSON_BYTES_MAX:,} bytes")
        start = json.loads(content)
        options, machine = start.get("recipe_config", {}), start["environment"]
        work = todays_workload(start["workload"], start.get("config", {}))
        packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items())
        about = f"Python {machine['python']}, {packages}, {machine['device']}"
        return RunStart(
            workload=work,
            workload_hash=workload_hash(work),
            recipe_options="\n".join(clip(visible(f"{name}={value}")) for name, value in sorted(options.items())),
            command=clip(visible(shlex.join(start["command"])), 4000),
            environment=clip(visible(about), 4000),
        )
    except FileNotFoundError:
        return RunStart()
    except DamagedFileError as error:
        return RunStart(damage=f"run.json is not read: {error}")
    except KeyError as error:
        return RunStart(damage=f"run.json is damaged: it has no {visible(str(error))}")
    except (ValueError, TypeError, AttributeError, RecursionError):
        return RunStart(damage="run.json is damaged: it is not what a run writes")


def read_shares(folder: str, run_id: str) -> dict[str, float]:
    """Return the shares of time in a run's verdict.json, none if there is no verdict or it is damaged."""
    try:
        with run_file(folder, run_id, "verdict.json") as file:
            content = json.loads(file.read(VERDICT_BYTES_MAX + 1))
        shares = {name: float(content["shares"].get(name, 0.0)) for name in SHARES}
        return shares if all(0.0 <= share <= 1.0 for share in shares.values()) else {}
    except (OSError, DamagedFileError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return {}


def read_steps(folder: str, run_id: str) -> tuple[pd.DataFrame, str]:
    """Return the steps and losses of a run's steps.csv, and what is wrong with the file, which is empty for a whole one."""
    import numpy as np
    import pandas as pd

    steps, losses, n_bad = array("q"), array("d"), 0
    damage = ""
    try:
        with run_file(folder, run_id, "steps.csv") as file:
            lines = whole_lines(file)
            header = next(lines, b"").rstrip(b"\r\n").split(b",")
            if b"step" not in header or b"loss" not in header:
                raise DamagedFileError("it has no columns step and loss" if header != [b""] else "it is empty")
            i, j, n = header.index(b"step"), header.index(b"loss"), len(header)
            for line in lines:
                cells = line.split(b",")
                try:
                    step, loss = int(cells[i]), float(cells[j])
                    if len(cells) != n or not 0 <= step <= NUMBER_MAX:
                        raise ValueError
                except (ValueError, IndexError):
                    n_bad += 1
                    continue
                steps.append(step)
                losses.append(loss if abs(loss) < NUMBER_MAX else math.nan)
    except FileNotFoundError:
        pass
    except DamagedFileError as error:
        damage = f"steps.csv is not read: {error}"
    if n_bad:
        damage = f"steps.csv has {n_bad:,} lines that are no rows"
    frame = pd.DataFrame({"step": np.array(steps, dtype=np.int64), "loss": np.array(losses, dtype=float)})
    return frame.drop_duplicates("step", keep="last"), damage


def whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file, but not a last one without a newline, which is still being written, or torn.

    Of a line that is too long the part that is not read is left out.
    """
    while line := file.readline(LINE_BYTES_MAX):
        first_part = line
        while line and not line.endswith(b"\n"):
            line = file.readline(LINE_BYTES_MAX)
        if line:
            yield first_part


def clip(text: str, length: int = TEXT_MAX) -> str:
    """Return at most `length` characters of a text, with dots in place of the rest."""
    return text if len(text) <= length else text[: length - 3] + "..."
