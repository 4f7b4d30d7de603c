"""The folder of a run: made and locked when the run starts, with its status and its row when it ends."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from gptscale.common.checkpoint.folders import step_folders
from gptscale.common.errors import CheckpointError, ConfigError, StorageError
from gptscale.common.measure.evidence import EVIDENCE, VERDICT, RunEvidence
from gptscale.common.process.begin import Output
from gptscale.common.settings.checks import RUN_WORDS
from gptscale.common.settings.user_file import read_bytes
from gptscale.results.columns import RunTable, cell, csv_line
from gptscale.results.record.files import append_row, host_name, opened, replace_file, storage_errors, warn, write_json

# The environment variable by which our launcher names one start of a run. It tells what this start wrote from what an earlier
# start, or another run of that name, wrote.
START = "GPTSCALE_START"
# A run's own JSON files have some kilobytes.
JSON_BYTES_MAX = 2**24


@contextmanager
def run_directory(out: Path, run_id: str, *, resumes: bool = False) -> Iterator[Path]:
    """Make the folder `out`/runs/<run_id>, and lock it for this process.

    Raises ConfigError if another process has locked it, or if it holds a run already and this one does not resume. It is
    locked first and looked into then, so that of two runs that start with one name only one goes on. A killed process
    keeps its lock until its last thread has ended. Raises StorageError for a symbolic link: private files must not be elsewhere.
    """
    folder = out / "runs" / run_id
    with storage_errors(folder):
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
            if each.is_symlink():
                raise StorageError(f"{each} is a symbolic link", "in --out", "remove it or choose another folder")
    with opened(folder / ".lock") as descriptor:
        # A thread of a killed process may still wait for a busy disk. It gets three seconds.
        for _ in range(30):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            what = f"run {run_id} is in use by {holder}"
            raise ConfigError(what, f"in {out}", "wait for it or choose another --run-name")
        if not resumes and (folder / "run.json").exists():
            raise ConfigError(f"run {run_id} exists already", f"in {out}", "add --resume or choose another --run-name")
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        # A failure of an earlier start says nothing of this one.
        (folder / EVIDENCE).unlink(missing_ok=True)
        # On a full disk the run is locked all the same, only its holder is not named.
        with suppress(OSError):
            os.write(descriptor, f"pid {os.getpid()} on host {host_name()} since {since}\n".encode())
        yield folder


def of_this_start(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what run.json or status.json holds: `facts` and the start that wrote them, empty without our launcher."""
    return {**facts, "start": os.environ.get(START, "")}


def read_json(file: Path) -> dict[str, Any]:
    """Return what a run wrote, or nothing if it is not there or damaged."""
    try:
        refuse = partial(StorageError, where="in the run's folder", fix="remove it")
        content = json.loads(read_bytes(file, JSON_BYTES_MAX, refuse))
    except (StorageError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def leave_end(folder: Path, row: Mapping[str, Any], step: int) -> None:
    """Write the status.json of a run whose steps are over, with its row so far, from which a launcher can write the row.

    From here on the run has ended as `row` says, whichever rank dies before the row is in the summary. That a disk does not take
    it is told when the row is written.
    """
    with suppress(StorageError):
        write_json(folder / "status.json", of_this_start(_end_of(row, step) | {"row": dict(row)}))


def has_its_row(folder: Path, steps: int) -> bool:
    """Return whether a run has taken all its steps and left its row."""
    end = read_json(folder / "status.json")
    return end.get("status") == "ok" and "row" not in end and end.get("step") == steps


def leave_evidence(folder: Path, evidence: RunEvidence) -> bool:
    """Write the evidence for whoever judges the run, and return whether the disk took it."""
    try:
        # That of an earlier start.
        (folder / VERDICT).unlink(missing_ok=True)
        replace_file(folder / EVIDENCE, evidence.as_json())
        return True
    except (StorageError, OSError) as error:
        warn(f"{folder.name} has no verdict, because its evidence was not kept ({error})")
        return False


def _end_of(row: Mapping[str, Any], step: int) -> dict[str, Any]:
    lost = {"unprinted_bytes": Output.lost_bytes} if Output.lost_bytes else {}
    return {"status": row["status"], "error": row["error"], "step": step, **lost}


def leave_row(table: RunTable, folder: Path, row: Mapping[str, Any], step: int) -> Path | None:
    """Write the row of a run that has ended, then its status.json, and return the file that has the row.

    What the disk does not take is printed in full, and None is returned.
    table: gets the row. step: the last that was taken.
    """
    path = None
    try:
        path = append_row(table, folder.parents[1], row)
        write_json(folder / "status.json", of_this_start(_end_of(row, step)))
        if Output.lost_bytes:
            warn(f"{Output.lost_bytes:,} bytes of this run's output could not be written, its files have all figures")
        return path
    except StorageError as error:
        lines = csv_line(row) + csv_line(cell(value) for value in row.values())
        lost_row = "" if path else f"gptscale: the row of this run, which no file has:\n{lines.decode()}"
        # The log of the run may be on the same disk.
        with suppress(OSError):
            sys.stderr.write(f"gptscale: error: {error}\n{lost_row}")
            sys.stderr.flush()
        return None


# No header is as long as that.
HEADER_BYTES_MAX = 2**16


def check_results_folder(out: Path, run_name: str | None, table: RunTable, *, resumes: bool) -> None:
    """Raise ConfigError or StorageError unless a run can write its folder and its row under `out`.

    The folder, or the nearest one that exists above it, must be a folder, and one that can be written, else StorageError.
    table: that of the row, whose file is of this or an earlier version if it exists.
    resumes: whether the run continues an earlier one, whose folder then may exist.
    """
    nearest = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        kind = StorageError if nearest.is_dir() else ConfigError
        raise kind(f"results folder {out} cannot be written", f"at {nearest}", "point --out to a folder that can")
    rows = out / table.file
    if rows.exists() and not rows.is_file():
        raise ConfigError(f"{rows} is no file", "in --out", "remove it, or choose another folder")
    if rows.exists():
        with rows.open("rb") as file:
            fault = table.fault(file.readline(HEADER_BYTES_MAX))
        if fault:
            raise ConfigError(f"{rows} {fault}", "in --out", "point --out to another folder, or move the file")
    if run_name and not resumes and (out / "runs" / run_name).exists():
        raise ConfigError(f"run {run_name} exists already", f"in {out}", "add --resume or choose another --run-name")
    if run_name and (checkpoints := out / "runs" / run_name / "checkpoints").is_symlink():
        what = f"{checkpoints} is a symbolic link"
        raise ConfigError(what, "in --run-name", "replace it by a folder, or choose another")


def resume_folder(out: Path, run_name: str | None, resume: str | None) -> Path | None:
    """Return the folder that `--resume` names, where `newest` and `auto` mean that of the run.

    None: a run that begins, without the option or by `auto` if nothing is saved yet. Raises CheckpointError if it is no folder.
    """
    if resume is None:
        return None
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
