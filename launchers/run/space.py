"""The space that a run will take on the disk, estimated before its first step."""

from __future__ import annotations

import shutil
from pathlib import Path

from gptscale.common.checkpoint.reader import step_folders
from gptscale.common.errors import StorageError
from gptscale.common.settings.run import Run

# Per parameter: fp32 weights, and AdamW's two moments, which a checkpoint holds in fp32 whatever the run keeps them in.
WEIGHT_BYTES, MOMENTS_BYTES = 4, 8
# A row of steps.csv, an event of TensorBoard, and all files of a run that do not grow with its steps, each rounded up.
ROW_BYTES, EVENT_BYTES, OTHER_BYTES = 128, 256, 2**16


def check_space(run: Run, folder: Path) -> None:
    """Raise StorageError if the checkpoints and logs of a run cannot fit on the disk of its `folder`.

    While a checkpoint is saved, those that are kept are there too.
    """
    config = run.config
    saves = config.steps // config.save_every if config.save_every else 0
    if config.save_last or (config.save_every and config.steps % config.save_every):
        saves += 1
    there = len(step_folders(folder / "checkpoints"))
    n_checkpoints = max(0, min(there + saves, config.keep_checkpoints + 1) - there)
    per_parameter = WEIGHT_BYTES + (MOMENTS_BYTES if config.optimizer == "adamw" else 0)
    checkpoint_bytes = per_parameter * run.gpt.n_params_in_memory
    log_bytes = OTHER_BYTES + config.steps * (ROW_BYTES + EVENT_BYTES * config.tensorboard)
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
