"""Read a small file that a user named, which may be anything.

It may be a pipe that never ends, a device, too large, or full of NaN. Each function raises what `refuse` makes
of the reason, which is a few words: an error of the caller's kind, in one line.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gptscale.common.errors import GptscaleError, visible

Refuse = Callable[[str], GptscaleError]
# Digits of a whole number in JSON. 64 bits have 19.
DIGITS_MAX = 19


def read_bytes(path: Path, most: int, refuse: Refuse) -> bytes:
    """Return the content of a regular file that has at most `most` bytes."""
    try:
        # Without waiting: a pipe has no writer yet, and may never have one. What was opened is looked at, not what has the name.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise refuse("it is no file")
            content = file.read(most + 1)
    except IsADirectoryError:
        raise refuse("it is a folder") from None
    except (OSError, ValueError) as error:
        raise refuse(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > most:
        raise refuse(f"it has more than {most} bytes")
    return content


def read_text(path: Path, most: int, refuse: Refuse) -> str:
    """Return the text of such a file, without the mark that some programs put before UTF-8."""
    try:
        return read_bytes(path, most, refuse).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refuse(f"byte {error.start} is not UTF-8 text") from None


def read_json(path: Path, most: int, refuse: Refuse, *, deepest: int = 32) -> Any:
    """Return the value in such a file, nested at most `deepest` levels, whose numbers are finite and fit 64 bits."""
    text = read_text(path, most, refuse)
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=finite, parse_int=_short)
        is_deep = _depth(value) > deepest
    except RecursionError:
        is_deep = True
    except ValueError as error:
        raise refuse(f"it is no JSON: {visible(str(error))[:120]}") from None
    if is_deep:
        raise refuse(f"it is nested deeper than {deepest} levels")
    return value


def read_rows(path: Path, most: int, refuse: Refuse, columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the rows of such a CSV, which has these columns and perhaps more, and as many cells in each row."""
    try:
        reader = csv.DictReader(io.StringIO(read_text(path, most, refuse), newline=""), strict=True)
        names = list(reader.fieldnames or [])
        if missing := [name for name in columns if name not in names]:
            raise refuse(f"it has no column {missing[0]}")
        rows = []
        for row in reader:
            if None in row or None in row.values():
                raise refuse(f"line {reader.line_num} has not {len(names)} cells")
            rows.append(row)
        return rows
    except csv.Error as error:
        raise refuse(f"it is no CSV: {error}") from None


def read_table(path: Path, most: int, refuse: Refuse) -> str:
    """Return the text of such a CSV, none of whose rows has more cells than its first.

    pandas takes a minute over a row with many more.
    """
    text = read_text(path, most, refuse)
    try:
        lines = csv.reader(io.StringIO(text, newline=""))
        width = len(next(lines, []))
        if any(len(cells) > width for cells in lines):
            raise refuse(f"a row has more than {width} cells")
    except csv.Error as error:
        raise refuse(f"it is no CSV: {error}") from None
    return text


def finite(text: str) -> float:
    """Return a number that a user wrote, or raise ValueError for NaN, and for one beyond all that can be computed with."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value


def _short(text: str) -> int:
    if len(text.lstrip("-")) > DIGITS_MAX:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)
