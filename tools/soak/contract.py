"""Check what a run left when it ended: whole files, earlier checkpoints unchanged, no torn line."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

from gptscale.common.checkpoint.folders import step_folders
from gptscale.common.checkpoint.reader import Reader
from gptscale.common.errors import GptscaleError

Bytes = dict[str, str]


def bytes_of(run: Path) -> Bytes:
    """Return a hash of the files of each checkpoint of a run that is complete, by its name."""
    hashes = {}
    for folder in step_folders(run / "checkpoints"):
        digest = hashlib.sha256()
        try:
            for path in sorted(folder.iterdir()):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        except OSError:
            # Rotation may have just deleted it.
            continue
        hashes[folder.name] = digest.hexdigest()
    return hashes


def broken_promises(run: Path, before: Bytes) -> list[str]:
    """Return what is wrong with the files that a run left when it ended.

    before: the checkpoints as they were when the fault struck. Each still has the same bytes or was replaced by a newer one;
    all that are there verify; and every line of every CSV is whole.
    """
    wrong = []
    after = bytes_of(run)
    wrong += [f"{name} has changed" for name in before.keys() & after.keys() if before[name] != after[name]]
    if before and max(map(_step, after), default=0) < max(map(_step, before)):
        wrong.append(f"of {', '.join(before)} only {', '.join(after) or 'nothing'} is left")
    for folder in step_folders(run / "checkpoints"):
        try:
            Reader(folder).verify()
        except GptscaleError as error:
            wrong.append(str(error))
    for path in (run / "steps.csv", run / "eval.csv", run / "spikes.csv", run.parents[1] / "summary.csv"):
        wrong += torn_lines(path)
    # Each start goes on from the newest checkpoint, so that none is beyond it. Rows beyond it are, and stay whole.
    wrong += [f"{path.name} was a good checkpoint" for path in (run / "checkpoints").glob("*.discarded*")]
    for path in run.glob("*.discarded.csv"):
        with (run / path.name.replace(".discarded", "")).open("rb") as kept:
            wrong += torn_lines(path, kept.readline().decode())
    return wrong


def torn_lines(path: Path, header_line: str = "") -> list[str]:
    """Return what is wrong with the lines of a CSV, if it exists and is not empty: each must have all its columns.

    header_line: that of a file of discarded rows, which has none, and to which several starts add.
    """
    text = header_line + path.read_text() if path.exists() else ""
    if not text:
        return []
    wrong = [] if text.endswith("\n") else [f"the last line of {path.name} is torn"]
    header, *rows = csv.reader(text.splitlines())
    wrong += [f"line {i} of {path.name} is torn" for i, row in enumerate(rows, 2) if len(row) != len(header)]
    if header[0] == "step" and not header_line:
        steps = [int(row[0]) if row and row[0].isdecimal() else 0 for row in rows if len(row) == len(header)]
        if steps != sorted(set(steps)):
            wrong.append(f"{path.name} has steps twice or in disorder")
    return wrong


def _step(name: str) -> int:
    return int(name.split("-")[1])
