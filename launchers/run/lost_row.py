"""Leave the row of a run whose rank 0 was killed: python -m gptscale.launchers.run.lost_row FOLDER STATUS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gptscale.common.errors import StorageError
from gptscale.results.record.files import append_summary, warn
from gptscale.results.record.run_folder import START, read_json


def leave_lost_row(folder: Path, status: int) -> None:
    """Write the row of the start that the environment names, unless it never began or has ended by itself."""
    start = os.environ[START]
    began, ended = (read_json(folder / name) for name in ("run.json", "status.json"))
    if began.get("start") != start or ended.get("start") == start:
        return
    error = f"ended with status {status} before it could leave its own row"
    try:
        append_summary(folder.parents[1], {**began["identity"], "status": "failed", "error": error})
    except StorageError as full:
        warn(str(full))


if __name__ == "__main__":
    leave_lost_row(Path(sys.argv[1]), int(sys.argv[2]))
