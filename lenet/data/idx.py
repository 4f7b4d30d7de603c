"""Readers of MNIST's idx files, which check each file against its own header.

Plain files are memory-mapped, gzipped ones are unpacked.

The format (LeCun, Cortes & Burges, "The MNIST database"): four bytes of magic (0, 0, element type, number of dimensions), each
dimension as a big-endian 32-bit number, then the elements in row-major order.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptscale.common.errors import DataError

# 08 stands for unsigned bytes, 03 and 01 are the numbers of dimensions.
MAGIC = {"images": 0x00000803, "labels": 0x00000801}
# Largest content of a gzipped file, which is unpacked in memory. EMNIST's largest file has half as much.
UNPACKED_BYTES_MAX = 2**30
PIECE_BYTES = 2**20
FILES = {"train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
         "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")}  # fmt: skip


def read_pair(images: Path, labels: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the images and labels of two files, or raise DataError if their counts differ."""
    image_array, label_array = read(images, "images"), read(labels, "labels")
    if len(image_array) != len(label_array):
        what = f"{len(image_array)} images but {len(label_array)} labels"
        fix = "take both files from the same release of the data"
        raise DataError(what, f"in {images} and {labels.name}", fix)
    return image_array, label_array


def find(folder: Path, name: str) -> Path:
    """Return the path of `name` in `folder`, plain or gzipped, or raise DataError if neither exists."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{name} is missing", f"in {folder}", "put all four files of MNIST there, or name another folder")


def is_idx_folder(folder: Path) -> bool:
    """Return whether the folder has any of MNIST's four files, in which case all four are expected."""
    names = [name for pair in FILES.values() for name in pair]
    return any((folder / f"{name}{end}").is_file() for name in names for end in ("", ".gz"))


def read(path: Path, what: str) -> NDArray[np.uint8]:
    """Return the images of an idx3 file, (n, rows, columns), or the labels of an idx1 file, (n,), as a read-only array.

    The array is memory-mapped unless the file is gzipped. Raises DataError for another magic number, for a header that is cut
    off, and for a size that differs from what the header says.
    what: images or labels.
    """
    magic = MAGIC[what]
    if not path.is_file():
        fault = "is no file" if path.exists() else "does not exist"
        raise DataError(f"{path.name} {fault}", f"in {path.parent}", "check --data")
    packed = _first_bytes(path, 2) == b"\x1f\x8b"
    header_bytes = 4 * (1 + (magic & 0xFF))
    # The header says how long the file must be, before any of the rest is unpacked.
    header = _unpacked(path, header_bytes) if packed else _first_bytes(path, header_bytes)
    file_magic = int.from_bytes(header[:4], "big")
    if len(header) >= 4 and file_magic != magic:
        fix = f"give an idx file of {what}, unsigned bytes"
        raise DataError(f"magic 0x{file_magic:08x}, expected 0x{magic:08x}", f"in {path}", fix)
    if len(header) < header_bytes:
        raise DataError(f"{len(header)} bytes, expected a header of {header_bytes}", f"in {path}", "get the file again")
    shape = tuple(np.frombuffer(header[4:], ">u4").tolist())
    expected, sizes = header_bytes + math.prod(shape), " x ".join(map(str, shape))
    if packed:
        if expected > UNPACKED_BYTES_MAX:
            fault = f"{sizes} {what} are more than {UNPACKED_BYTES_MAX} bytes"
            raise DataError(fault, f"in {path}", "unpack it: gunzip")
        content: NDArray[np.uint8] = np.frombuffer(_unpacked(path, expected + 1, expected), np.uint8)
        content.flags.writeable = False
        size = f"more than {expected}" if len(content) > expected else f"{len(content)}"
    else:
        content, size = np.memmap(path, np.uint8, "r"), f"{path.stat().st_size}"
    if len(content) != expected:
        raise DataError(f"{size} bytes, expected {expected} for {sizes} {what}", f"in {path}", "get the file again")
    return content[header_bytes:].reshape(shape)


def _first_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def _unpacked(path: Path, count: int, expected: int | None = None) -> bytearray:
    """Return the first `count` bytes of a gzipped file, or all if it has fewer, in memory for no more than that.

    Raises DataError for a stream that is cut off or damaged, with the number of bytes that could be read.
    expected: the length that the header names, for the error.
    """
    content = bytearray()
    try:
        with gzip.open(path) as file:
            while piece := file.read1(min(PIECE_BYTES, count - len(content))):
                content += piece
        return content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        fault = f"{'ends' if isinstance(error, EOFError) else 'is damaged'} after {len(content)} bytes"
        fault += "" if expected is None else f", expected {expected}"
        raise DataError(f"the gzip stream {fault}", f"in {path}", "get the file again") from None
