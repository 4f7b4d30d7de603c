"""The space that checkpoints and logs of a run will take, compared with what is free before its first step."""

from __future__ import annotations

import shutil
from pathlib import Path

from gptscale.common.checkpoint.folders import step_folders
from gptscale.common.errors import StorageError

# A row of a CSV, an event of TensorBoard, and all files of a run that do not grow with its steps, each rounded up.
ROW_BYTES, EVENT_BYTES, OTHER_BYTES = 128, 256, 2**16


def check_free(folder: Path, *, saves: int, keep: int, checkpoint_bytes: int, log_bytes: int) -> None:
    """Raise StorageError if a run's checkpoints and logs cannot fit on the disk of its `folder`.

    saves: how often the run saves. keep: how many checkpoints stay. While one is saved, those that are kept are there too.
    """
    there = len(step_folders(folder / "checkpoints"))
    n_checkpoints = max(0, min(there + saves, keep + 1) - there)
    needed = n_checkpoints * checkpoint_bytes + log_bytes
    nearest = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(nearest).free
    if needed > free:
        checkpoints = f"{n_checkpoints} checkpoints of {checkpoint_bytes:,} and " if n_checkpoints else ""
        raise StorageError(
            f"the run needs {needed:,} bytes on the disk ({checkpoints}{log_bytes:,} of logs), {free:,} are free",
            f"in {nearest}",
            "free space, save fewer checkpoints or point --out elsewhere",
        )
