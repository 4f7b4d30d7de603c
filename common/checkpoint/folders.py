"""The folders of checkpoints: their names, and how one is set aside or removed so that a kill never leaves half of one.

* `step-300` is a finished checkpoint.
* `step-300.corrupt` did not verify. It is never deleted.
* `step-300.discarded` lies beyond the step from which the run was resumed. It is never deleted.
* `.tmp-step-300-...` is being written or deleted. What a killed run left is removed at the next save.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import uuid
from pathlib import Path

from gptscale.common.checkpoint.manifest import STEP_FOLDER, sha256_of
from gptscale.common.errors import CheckpointError, StorageError

# The list of hashes by which a user allows single pickles to be read, and a line of it.
SUMS = "SHA256SUMS"
SUMS_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


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


def check_sums(folder: Path) -> None:
    """Raise CheckpointError unless `folder` has a list of hashes by this user, and exactly the files that it lists.

    Reading a pickle can run any code. So a checkpoint of DeepSpeed's is read only with --trust-checkpoint, and only if each of
    its files is the one that the user listed in SHA256SUMS beside it, as `sha256sum` writes it.
    """
    command = f"cd {shlex.quote(str(folder))} && sha256sum * > {SUMS} && chmod 600 {SUMS}"
    record = f"once you are sure of its files, run ({command})"
    file = folder / SUMS
    if not file.is_file() or file.is_symlink():
        raise CheckpointError(f"{folder} has no {SUMS}", "in --trust-checkpoint", record)
    status = file.stat()
    # Whoever may write the list decides which code runs.
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CheckpointError(f"others can write {file}", "in --trust-checkpoint", record)
    lines = file.read_text(errors="replace").splitlines() if status.st_size < 2**24 else []
    hashes = {match[2]: match[1] for match in map(SUMS_LINE.fullmatch, lines) if match and match[2] != SUMS}
    for name in sorted(hashes.keys() ^ ({path.name for path in folder.iterdir()} - {SUMS})):
        what = f"{name!r} is missing" if name in hashes else f"{name!r} is not in {SUMS}"
        raise CheckpointError(what, f"in {folder}", record)
    for name, expected in hashes.items():
        if not (folder / name).is_file() or sha256_of(folder / name) != expected:
            raise CheckpointError(f"{name!r} does not match {SUMS}", f"in {folder}", record)


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
