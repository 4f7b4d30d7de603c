"""The comparison of a run that was broken with one that was not, to the last bit."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch

from gptscale.common.checkpoint.reader import Reader
from tools.soak.work import STEPS

# Columns of steps.csv. The others are times. A cell counts 64 bits.
COLUMNS = ("step", "tokens", "loss", "grad_norm", "lr")
CELL_BITS = 64


def lost_bits(run: Path, unbroken: Path) -> int:
    """Return in how many bits a run differs from the unbroken one.

    Counted are the rows of steps.csv, eval.csv and spikes.csv without times, and tensors and counters of the last checkpoint.
    """
    lost = cells(run / "steps.csv", unbroken / "steps.csv", COLUMNS)
    lost += cells(run / "eval.csv", unbroken / "eval.csv", ("step", "loss"))
    lost += cells(run / "spikes.csv", unbroken / "spikes.csv", ("step",))
    checkpoint = Path("checkpoints", f"step-{STEPS}")
    return lost + bits(Reader(run / checkpoint).verify(), Reader(unbroken / checkpoint).verify())


def cells(path: Path, expected: Path, columns: tuple[str, ...]) -> int:
    """Return the bits of the cells that differ between two CSVs, each missing or additional cell too."""
    rows, expected_rows = _rows(path, columns), _rows(expected, columns)
    n_rows = max(len(rows), len(expected_rows))
    same = sum(a == b for row, other in zip(rows, expected_rows, strict=False) for a, b in zip(row, other, strict=True))
    return CELL_BITS * (n_rows * len(columns) - same)


def bits(saved: Reader, expected: Reader) -> int:
    """Return the bits that differ between two checkpoints, all of a tensor that only one has."""
    lost = 0
    for name in {*saved.shapes, *expected.shapes}:
        present = [reader.read(name) for reader in (saved, expected) if name in reader.shapes]
        data = [np.frombuffer(_bytes(tensor), np.uint8) for tensor in present]
        same_layout = len({(tensor.dtype, tensor.shape) for tensor in present}) == 1 and len(present) == 2
        differing = data[0] ^ data[1] if same_layout else np.full(max(map(len, data)), 255, np.uint8)
        lost += int(np.unpackbits(differing).sum())
    return lost + (CELL_BITS if saved.manifest["counters"] != expected.manifest["counters"] else 0)


def _rows(path: Path, columns: tuple[str, ...]) -> list[list[str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [[str(row.get(column)) for column in columns] for row in csv.DictReader(file)]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
