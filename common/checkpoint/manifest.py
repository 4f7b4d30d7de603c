"""The manifest of a checkpoint: how it is written, and how all of it is checked before any of it is used.

Its last entry is the SHA-256 of all the others. Checkpoints of format version 1 have no such entry and are still read.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gptscale.common.errors import CheckpointError, StorageError
from gptscale.common.process.ending import is_out_of_memory

FORMAT_VERSION = 2
SEAL = re.compile(rb',\n "manifest_sha256": "([0-9a-f]{64})"\n}')
SEAL_BYTES = len(',\n "manifest_sha256": ""\n}') + 64
FIX = "resume from another checkpoint"
# The writer begins a new file after this many boxes, so a manifest needs no more than the bytes below for each file.
BOXES_PER_FILE = 1024
MANIFEST_BYTES, MANIFEST_BYTES_PER_FILE = 2**20, 2**20
# Most bytes that the header of a data file needs for itself, and for each box.
HEADER_BYTES, HEADER_BYTES_PER_BOX = 2**12, 2**10
DATA_FILE = re.compile(r"rank-\d{5}-\d{4}\.safetensors")
STEP_FOLDER = re.compile(r"step-(\d{1,12})")
SHA256 = re.compile(r"[0-9a-f]{64}")
# The types of tensors in the headers of data files, and what the manifest calls them.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the manifest, for example `float32`."""
    return str(dtype).removeprefix("torch.")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex, reading it in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(facts: dict[str, Any]) -> bytes:
    """Return the manifest of `facts` as bytes, with its version first and the hash of all before it last."""
    text = json.dumps({"format_version": FORMAT_VERSION, **facts}, indent=1).encode().removesuffix(b"\n}")
    return text + f',\n "manifest_sha256": "{hashlib.sha256(text).hexdigest()}"\n}}'.encode()


def damaged(path: Path, file: str, how: str) -> CheckpointError:
    """Return the error that says what is wrong with a file of the checkpoint at `path`."""
    return CheckpointError(f"{file} {how}", f"in checkpoint {path}", FIX)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise an error of the user's for whatever fails inside, where the checkpoint at `path` is read.

    StorageError if it could not be read, as when a disk stalls or a library is broken: that says nothing about its bytes.
    CheckpointError if it was read and is wrong.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ImportError) as error:
        how = f"cannot be read ({type(error).__name__}: {str(error)[:160]})"
        raise StorageError(f"the checkpoint {how}", f"at {path}", "mend what fails and start again") from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise damaged(path, "reading", f"failed ({type(error).__name__}: {str(error)[:160]})") from error


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path`, or raise CheckpointError if it is not what a save wrote."""
    file = path / "manifest.json"
    if not file.is_file():
        raise damaged(path, "manifest.json", "is missing")
    # A reader needs some 25 times the bytes of what it parses, so the size is checked first.
    most = MANIFEST_BYTES + MANIFEST_BYTES_PER_FILE * sum(1 for _ in path.glob("rank-*.safetensors"))
    if not 0 < (size := file.stat().st_size) <= most:
        raise damaged(path, "manifest.json", f"has {size} bytes, expected 1 to {most}")
    data = file.read_bytes()
    seal = SEAL.fullmatch(data, max(0, len(data) - SEAL_BYTES))
    if seal and hashlib.sha256(data[: seal.start()]).hexdigest().encode() != seal[1]:
        raise damaged(path, "manifest.json", "does not match its own SHA-256")
    collects = gc.isenabled()
    # The collector would walk through the growing tree again and again, which takes ten times as long as the parsing.
    gc.disable()
    try:
        manifest: dict[str, Any] = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "manifest.json", f"is no JSON ({type(error).__name__})") from None
    finally:
        if collects:
            gc.enable()
    _require(path, isinstance(manifest, dict) and type(manifest.get("format_version")) is int, "format_version")
    if manifest["format_version"] not in (1, FORMAT_VERSION):
        version, fix = str(manifest["format_version"])[:20], f"this package reads 1 to {FORMAT_VERSION}"
        raise CheckpointError(f"format version {version} is unknown", f"in checkpoint {path}", fix)
    if manifest["format_version"] > 1 and not seal:
        raise damaged(path, "manifest.json", "has lost its own SHA-256")
    _check_facts(path, manifest)
    for entry in manifest["files"]:
        _check_entry(path, entry)
    _check_boxes(path, manifest["files"])
    return manifest


def _require(path: Path, holds: object, what: str) -> None:
    if not holds:
        raise damaged(path, "manifest.json", f"has no valid {what!r}")


def _is_count(value: object, low: int = 0, high: int = 2**63 - 1) -> bool:
    # A bool is an int to Python.
    return type(value) is int and low <= value <= high


def _check_facts(path: Path, manifest: dict[str, Any]) -> None:
    step, counters, files = (manifest.get(key) for key in ("step", "counters", "files"))
    _require(path, _is_count(step, high=10**12 - 1), "step")
    folder = STEP_FOLDER.fullmatch(path.name)
    if folder and int(folder.group(1)) != step:
        raise damaged(path, "manifest.json", f"has step {step}, the folder is {path.name}")
    numbers = isinstance(counters, dict) and all(type(n) in (int, float) for n in counters.values())
    _require(path, numbers and all(0 <= n < 2**63 for n in counters.values()), "counters")  # type: ignore[union-attr]
    _require(path, isinstance(manifest.get("workload"), dict), "workload")
    _require(path, isinstance(manifest.get("recipe", ""), str), "recipe")
    _require(path, _is_count(manifest.get("world_size", 1), 1), "world_size")
    _require(path, isinstance(files, list) and all(isinstance(entry, dict) for entry in files), "files")


def _check_entry(path: Path, entry: dict[str, Any]) -> None:
    """Check what the manifest says about one data file."""
    file = entry.get("file")
    if not (isinstance(file, str) and DATA_FILE.fullmatch(file)):
        raise damaged(path, "manifest.json", "names a file that is none of a checkpoint's")
    _require(path, _is_count(entry.get("size"), 1), "size")
    _require(path, isinstance(entry.get("sha256"), str) and SHA256.fullmatch(entry["sha256"]), "sha256")
    boxes = entry.get("boxes")
    _require(path, isinstance(boxes, list) and all(isinstance(box, dict) for box in boxes), "boxes")
    for box in boxes or []:
        _require(path, isinstance(box.get("name"), str) and 0 < len(box["name"]) <= 512, "name")
        sizes = [box.get(key) for key in ("offset", "shape", "whole")]
        whole_numbers = all(isinstance(n, list) and len(n) <= 8 and all(map(_is_count, n)) for n in sizes)
        inside = whole_numbers and len({len(n) for n in sizes}) == 1
        _require(path, inside and all(o + n <= w for o, n, w in zip(*sizes, strict=True)), "shape")
        # The key stands in the data file too, whose hash is checked. So a changed name or offset is found here.
        _require(path, box.get("key") == f"{box['name']}@{','.join(map(str, box['offset']))}", "key")


def _check_boxes(path: Path, files: list[dict[str, Any]]) -> None:
    """Check that no file or box is there twice, and that the boxes of each tensor have as many elements as the tensor."""
    boxes = [box for entry in files for box in entry["boxes"]]
    _require(path, len({entry["file"] for entry in files}) == len(files), "files")
    _require(path, len({box["key"] for box in boxes}) == len(boxes), "boxes")
    numel: dict[tuple[str, tuple[int, ...]], int] = {}
    for box in boxes:
        tensor = box["name"], tuple(box["whole"])
        numel[tensor] = numel.get(tensor, 0) + math.prod(box["shape"])
    _require(path, len({name for name, _ in numel}) == len(numel), "whole")
    for (name, shape), n in numel.items():
        if n != math.prod(shape):
            raise damaged(path, f"tensor {name!r}", f"has {n} of {math.prod(shape)} elements")


def check_header(path: Path, entry: dict[str, Any]) -> None:
    """Check that the header of a data file has the boxes of its manifest entry, and that they fill the file exactly."""
    name, size = entry["file"], entry["size"]
    most = min(size - 8, HEADER_BYTES + HEADER_BYTES_PER_BOX * len(entry["boxes"]))
    with (path / name).open("rb") as file:
        (n_bytes,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if n_bytes > most:
            raise damaged(path, name, f"has a header of {n_bytes} bytes, expected at most {most}")
        header = json.loads(file.read(n_bytes))
    header.pop("__metadata__", None)
    boxes = {box["key"]: box for box in entry["boxes"]}
    if header.keys() != boxes.keys():
        raise damaged(path, name, f"has other tensors than the manifest: {sorted(header.keys() ^ boxes.keys())}"[:200])
    end = 0
    for key, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        box, dtype = boxes[key], DTYPES[tensor["dtype"]]
        if tensor["shape"] != box["shape"] or dtype_name(dtype) != box.get("dtype", dtype_name(dtype)):
            raise damaged(path, name, f"has {key!r} in another shape or type than the manifest")
        begin, end = end, end + math.prod(box["shape"]) * dtype.itemsize
        if tensor["data_offsets"] != [begin, end]:
            raise damaged(path, name, f"has {key!r} at bytes {tensor['data_offsets']}, expected {[begin, end]}")
    if 8 + n_bytes + end != size:
        raise damaged(path, name, f"has {size} bytes, its header describes {8 + n_bytes + end}")
