"""The folders of checkpoints: their names, and how one is set aside or removed so that a kill never leaves half of one.

* `step-300` is a finished checkpoint.
* `step-300.corrupt` did not verify. It is never deleted.
* `step-300.discarded` lies beyond the step from which the run was resumed. It is never deleted.
* `.tmp-step-300-...` is being written or deleted. What a killed run left is removed at the next save.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from gptscale.common.checkpoint.manifest import STEP_FOLDER
from gptscale.common.errors import CheckpointError, StorageError


def step_folders(folder: Path) -> list[Path]:
    """Return the finished checkpoints under `folder`, newest first."""
    paths = (path for path in folder.glob("step-*") if path.is_dir() and not path.is_symlink())
    by_step = [(int(match.group(1)), path) for path in paths if (match := STEP_FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(by_step, reverse=True)]


def is_deepspeeds_own(folder: Path) -> bool:
    """Return whether DeepSpeed's own save_checkpoint wrote `folder`, judging by the names of its files."""
    # A file `latest` holds the name of the folder to read; without it, `folder` may itself be that folder.
    return (folder / "latest").is_file() or any(folder.glob("*_model_states.pt"))


def temporary_name(step_folder: str) -> str:
    """Return a new name for a checkpoint that is being written or deleted."""
    return f".tmp-{step_folder}-{uuid.uuid4().hex}"


def make_private(folder: Path) -> None:
    """Make a folder that only the user can read, or raise StorageError if it is a symbolic link to elsewhere."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise StorageError(f"{folder} is a symbolic link", "in the run's folder", "replace it by a folder")


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint to `step-N.why`, with a suffix if there is one already, and return its new path."""
    aside = path.with_name(f"{path.name}.{why}")
    if aside.exists():
        aside = aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(path, aside)
    except OSError as error:
        fix = "make the folder writable, or resume with --resume PATH under another --run-name"
        raise StorageError(f"{path.name} cannot be set aside ({error.strerror})", f"in {path.parent}", fix) from None
    return aside


def set_aside_beyond(folder: Path, step: int) -> None:
    """Rename the checkpoints of a run beyond `step`, from which it goes on, to `step-N.discarded`, and say so in a line.

    Otherwise they would count as the newest, and rotation would delete what the run saves from now on.
    """
    # Newest first: after a kill, those that are left are the beginning of the old branch, from which the run can resume.
    beyond = [path for path in step_folders(folder) if int(path.name.removeprefix("step-")) > step]
    if names := [set_aside(path, "discarded").name for path in beyond]:
        print(f"set aside what lies beyond step {step} in {folder}: {', '.join(names)}", flush=True)


def retire(path: Path) -> Path:
    """Rename a checkpoint that will be deleted, so that a kill leaves no half of one, and return its new path."""
    trash = path.with_name(temporary_name(path.name))
    os.rename(path, trash)
    return trash


def remove_leftovers(folder: Path, *, but: str) -> None:
    """Delete what killed saves left in `folder`, and name it in a line. but: the temporary folder of the save at work."""
    leftovers = [path for path in folder.glob(".tmp-step-*") if path.name != but and not path.is_symlink()]
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    if leftovers:
        names = ", ".join(sorted(path.name for path in leftovers))
        print(f"gptscale: warning: a killed run left {names}, in {folder}, removed", flush=True)


def deepspeeds_folder(folder: Path) -> Path:
    """Return the folder of the files that DeepSpeed would read: `folder`, or the one in it that its file `latest` names."""
    latest = folder / "latest"
    if latest.is_file():
        with latest.open("rb") as file:
            tag = file.read(256).decode(errors="replace").strip()
        # A path would lead out of the folder.
        if Path(tag).name != tag:
            raise CheckpointError(f"latest names {tag!r}", f"in {folder}", "give the folder of one step")
        folder = folder / tag
    if not any(folder.glob("*_model_states.pt")):
        raise CheckpointError(f"{folder} holds no *_model_states.pt", "in --resume", "give the folder of one step")
    return folder


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
        what = f"the run needs {needed:,} bytes on the disk ({checkpoints}{log_bytes:,} of logs), {free:,} are free"
        raise StorageError(what, f"in {nearest}", "free space, save fewer checkpoints or point --out elsewhere")
