"""Files of 16-bit token ids, in nanoGPT's layout and in llm.c's.

docs/guides/data.md has the offsets.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np

from gptscale.common.errors import DataError, StorageError

Layout = Literal["nanogpt", "llmc"]
LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER_BYTES = 20240520, 1, 1024
# llm.c's magics are dates. A nanoGPT file would have to begin with an id of 54928 or more to look like one, and GPT-2 has
# no id that large, so that the two layouts cannot be mistaken for each other.
LLMC_MAGICS = range(20240000, 20250001)
FIX = "check the file, or make it anew with `gptscale tokenize`"


def map_ids(path: Path) -> np.ndarray:
    """Return the ids (uint16) of a .bin file, memory-mapped read-only.

    Raises DataError with expected and actual bytes if the file is cut, grown, or of another magic or version.
    """
    size, where = path.stat().st_size, f"in {path}"
    header = np.fromfile(path, dtype="<i4", count=min(3, size // 4)).tolist()
    offset = 0
    if header and header[0] in LLMC_MAGICS:
        magic, version, count = (*header, None, None)[:3]
        if (magic, version) != (LLMC_MAGIC, LLMC_VERSION):
            what = f"magic {magic} version {version}, expected {LLMC_MAGIC} version {LLMC_VERSION}"
            raise DataError(what, where, FIX)
        offset = LLMC_HEADER_BYTES
        if count is None or size != offset + 2 * count:
            of_header = "" if count is None else f"{offset + 2 * count} for the {count} tokens its header counts"
            raise DataError(f"{size} bytes, expected {of_header or 'at least 1024'}", where, FIX)
    elif size % 2:
        raise DataError(f"{size} bytes, expected an even number: a token has 2", where, FIX)
    if size == offset:
        return np.empty(0, dtype="<u2")
    # A plain array over the map: slicing numpy's memmap class costs several times as much.
    return np.asarray(np.memmap(path, dtype="<u2", mode="r", offset=offset))


def write_bin(path: Path, parts: Iterable[np.ndarray], layout: Layout = "nanogpt") -> int:
    """Stream ids (uint16) to `path` and return their number.

    The file appears with all of them or not at all. Raises StorageError if it cannot be written, or would hold more tokens
    than llm.c's 32-bit count can tell.
    """
    count = 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(_llmc_header(0, path) if layout == "llmc" else b"")
            for ids in parts:
                file.write(ids.astype("<u2", copy=False).tobytes())
                count += len(ids)
            if layout == "llmc":
                file.seek(0)
                file.write(_llmc_header(count, path))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(str(error), f"while writing {path}", "free space, or write to another folder") from None
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _llmc_header(count: int, path: Path) -> bytes:
    if count > np.iinfo(np.int32).max:
        what = f"{count} tokens are more than llm.c's header can count"
        raise StorageError(what, f"in {path}", "use --layout nanogpt")
    header = np.zeros(LLMC_HEADER_BYTES // 4, dtype="<i4")
    header[:3] = LLMC_MAGIC, LLMC_VERSION, count
    return header.tobytes()
