"""MNIST's idx files: checked against their own header, memory-mapped, or unpacked when they are gzipped.

The format (LeCun, Cortes & Burges, "The MNIST database"): four bytes of magic (0, 0, element type, number of dimensions), each
dimension as a big-endian 32-bit number, then the elements in row-major order.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from gptscale.common.errors import DataError

IMAGES_MAGIC, LABELS_MAGIC = 0x00000803, 0x00000801  # 08: unsigned bytes; 03 and 01: number of dimensions
UNPACKED_BYTES_MAX = 2**32  # of a gzipped file; larger is no data set of this kind
PIECE_BYTES = 2**20
FILES = {"train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
         "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")}  # fmt: skip


def read_images(path: Path) -> NDArray[np.uint8]:
    """The images of an idx3 file as (n, rows, columns), read-only; memory-mapped unless the file is gzipped.

    Raises DataError for another magic, a header that is cut, or a size that is not what the header says.
    """
    return _read(path, IMAGES_MAGIC, "images")


def read_labels(path: Path) -> NDArray[np.uint8]:
    """The labels of an idx1 file as (n,); otherwise as `read_images`."""
    return _read(path, LABELS_MAGIC, "labels")


def read_pair(images: Path, labels: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images and their labels; DataError if their counts differ."""
    pictures, classes = read_images(images), read_labels(labels)
    if len(pictures) != len(classes):
        raise DataError(
            f"{len(pictures)} images but {len(classes)} labels",
            f"in {images} and {labels.name}",
            "take both files from the same release of the data",
        )
    return pictures, classes


def find(folder: Path, name: str) -> Path:
    """`name` in `folder`, as it is or gzipped; DataError if neither is there."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"{name} is missing", f"in {folder}", "name the folder that holds MNIST's four files, or --download"
    )


def is_idx_folder(folder: Path) -> bool:
    """Whether any of MNIST's four files is there: then all are expected."""
    names = [name for pair in FILES.values() for name in pair]
    return any((folder / f"{name}{end}").is_file() for name in names for end in ("", ".gz"))


class IdxDataset(Dataset[tuple[Tensor, int]]):
    """Pairs of an image, uint8 (1, rows, columns), and its label, straight from the mapped files."""

    def __init__(self, images: Path, labels: Path) -> None:
        self.images, self.labels = read_pair(images, labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # a copy of 784 bytes: torch wants memory that it may write to
        return torch.from_numpy(np.array(self.images[index]))[None], int(self.labels[index])


def _read(path: Path, magic: int, what: str) -> NDArray[np.uint8]:
    if not path.is_file():
        raise DataError(f"{path.name} does not exist", f"in {path.parent}", "check --data")
    n_dims = magic & 0xFF
    header_bytes = 4 * (1 + n_dims)
    packed = _starts_as_gzip(path)
    content = _unpacked(path) if packed else np.memmap(path, np.uint8, "r") if path.stat().st_size else _empty()
    if len(content) < 4:
        raise DataError(
            f"{len(content)} bytes, expected a header of {header_bytes}", f"in {path}", "get the file again"
        )
    found = int.from_bytes(content[:4].tobytes(), "big")
    if found != magic:
        raise DataError(
            f"magic 0x{found:08x}, expected 0x{magic:08x}", f"in {path}", f"give an idx file of {what}, unsigned bytes"
        )
    if len(content) < header_bytes:
        raise DataError(
            f"{len(content)} bytes, expected a header of {header_bytes}", f"in {path}", "get the file again"
        )
    shape = tuple(int(n) for n in np.frombuffer(content[4:header_bytes].tobytes(), ">u4"))
    expected = header_bytes + math.prod(shape)
    if len(content) != expected:
        sizes = " x ".join(map(str, shape))
        raise DataError(
            f"{len(content)} bytes, expected {expected} for {sizes} {what}", f"in {path}", "get the file again"
        )
    return content[header_bytes:].reshape(shape)


def _empty() -> NDArray[np.uint8]:
    return np.zeros(0, np.uint8)  # an empty file cannot be mapped


def _starts_as_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _unpacked(path: Path) -> NDArray[np.uint8]:
    """The whole content of a gzipped file; DataError where it is cut or damaged, with what could be read."""
    stream, content, said = zlib.decompressobj(wbits=31), bytearray(), ""
    with path.open("rb") as file:
        while not stream.eof and not said:
            if not (piece := file.read(PIECE_BYTES)):
                said = "ends"
                break
            try:
                content += stream.decompress(piece)
            except zlib.error:
                said = "is damaged"
            if len(content) > UNPACKED_BYTES_MAX:
                raise DataError(f"more than {UNPACKED_BYTES_MAX} bytes", f"in {path}", "give a file of images")
    if said:
        what = f"the gzip stream {said} after {len(content)} bytes{_promised(bytes(content))}"
        raise DataError(what, f"in {path}", "get the file again")
    return np.frombuffer(bytes(content), np.uint8)


def _promised(content: bytes) -> str:
    """What the header of a stream that broke off says of its length."""
    if len(content) < 4 or content[:3] != b"\0\0\x08" or len(content) < 4 * (1 + content[3]):
        return ""
    header_bytes = 4 * (1 + content[3])
    return f", expected {header_bytes + math.prod(np.frombuffer(content[4:header_bytes], '>u4').tolist())}"
