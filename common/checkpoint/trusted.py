"""The list of hashes by which a user allows single pickles to be read.

Reading a pickle can run any code. A checkpoint of DeepSpeed's is read only with --trust-checkpoint, and only if each of its files
is the one that the user listed in SHA256SUMS beside it, as `sha256sum` writes it.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path

from gptscale.common.checkpoint.reader import sha256_of
from gptscale.common.errors import CheckpointError

SUMS = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def check_sums(folder: Path) -> None:
    """Raise CheckpointError unless `folder` has a list of hashes by this user, and exactly the files that it lists."""
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
    hashes = {match[2]: match[1] for match in map(LINE.fullmatch, lines) if match and match[2] != SUMS}
    for name in sorted(hashes.keys() ^ ({path.name for path in folder.iterdir()} - {SUMS})):
        what = f"{name!r} is missing" if name in hashes else f"{name!r} is not in {SUMS}"
        raise CheckpointError(what, f"in {folder}", record)
    for name, expected in hashes.items():
        if not (folder / name).is_file() or sha256_of(folder / name) != expected:
            raise CheckpointError(f"{name!r} does not match {SUMS}", f"in {folder}", record)
