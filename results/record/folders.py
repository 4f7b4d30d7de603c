"""The folders of results: whether a run may write into them, and which checkpoint in them --resume means."""

from __future__ import annotations

import os
from pathlib import Path

from gptscale.common.checkpoint.folders import step_folders
from gptscale.common.errors import CheckpointError, ConfigError, StorageError
from gptscale.common.settings.checks import RUN_WORDS
from gptscale.results.columns import RunTable

# No header is as long as that.
HEADER_BYTES_MAX = 2**16


def check_results_folder(out: Path, run_name: str | None, table: RunTable, *, resumes: bool) -> None:
    """Raise ConfigError or StorageError unless a run can write its folder and its row under `out`.

    StorageError: the disk, or the rights on it, do not allow it.

    The folder, or the nearest one that exists above it, must be a folder that can be written.
    table: that of the row, whose file is of this or an earlier version if it exists.
    resumes: whether the run continues an earlier one, whose folder then may exist.
    """
    nearest = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        kind = StorageError if nearest.is_dir() else ConfigError
        fix = "point --out to a folder that can"
        raise kind(f"results folder {out} cannot be written", f"at {nearest}", fix)
    rows = out / table.file
    if rows.exists() and not rows.is_file():
        raise ConfigError(f"{rows} is no file", "in --out", "remove it, or choose another folder")
    if rows.exists() and (fault := table.fault(_first_line(rows))):
        raise ConfigError(f"{rows} {fault}", "in --out", "point --out to another folder, or move the file")
    if run_name and not resumes and (out / "runs" / run_name).exists():
        fix = "add --resume or choose another --run-name"
        raise ConfigError(f"run {run_name} exists already", f"in {out}", fix)
    if run_name and (checkpoints := out / "runs" / run_name / "checkpoints").is_symlink():
        raise ConfigError(
            f"{checkpoints} is a symbolic link", "in --run-name", "replace it by a folder, or choose another"
        )


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline(HEADER_BYTES_MAX)


def resume_folder(out: Path, run_name: str | None, resume: str) -> Path | None:
    """Return the folder that `--resume` names, where `newest` and `auto` mean that of the run.

    None: `auto` of a run that has saved nothing yet, which begins. Raises CheckpointError if it is no folder.
    """
    folder = out / "runs" / str(run_name) if resume in RUN_WORDS else Path(resume)
    # A checkpoint that was set aside is one too: a run whose checkpoints are all damaged never begins by itself.
    if resume == "auto" and not any((folder / "checkpoints").glob("step-*")):
        return None
    if not folder.is_dir():
        fix = "give the path of a run or of its checkpoints/step-N"
        raise CheckpointError(f"{folder} is no folder", "in --resume", fix)
    return folder


def checkpoints_in(folder: Path, save_option: str) -> Path:
    """Return the step-N folder that `folder` is, or else the folder of such folders in it.

    save_option: the command-line words that make a run save, for the message of the CheckpointError if there is none.
    """
    if (folder / "manifest.json").exists():
        return folder
    if folder.name.startswith("step-"):
        raise CheckpointError("manifest.json is missing", f"in checkpoint {folder}", "resume from another checkpoint")
    inner = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    if not step_folders(inner):
        raise CheckpointError(f"{folder} holds no checkpoint", "in --resume", f"run with {save_option} first")
    return inner
