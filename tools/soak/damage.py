"""What a bad disk does to checkpoints: flipped bits, cut and missing files."""

from __future__ import annotations

from pathlib import Path
from random import Random

from gptscale.common.checkpoint.folders import step_folders


def flip_bit(file: Path, random: Random) -> None:
    """Flip one bit of a file."""
    data = bytearray(file.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    file.write_bytes(data)


def cut(file: Path, random: Random) -> None:
    """Cut off a part of the end of a file, at least one byte."""
    data = file.read_bytes()
    file.write_bytes(data[: random.randrange(len(data))])


def any_file(checkpoint: Path, random: Random) -> Path:
    """Return one of the files of a checkpoint, among them its manifest."""
    return random.choice(sorted(path for path in checkpoint.iterdir() if path.is_file()))


def flip_in_newest(checkpoints: Path, random: Random) -> None:
    """Flip one bit in one file of the newest checkpoint."""
    flip_bit(any_file(step_folders(checkpoints)[0], random), random)


def cut_in_newest(checkpoints: Path, random: Random) -> None:
    """Cut one file of the newest checkpoint."""
    cut(any_file(step_folders(checkpoints)[0], random), random)


def remove_in_newest(checkpoints: Path, random: Random) -> None:
    """Remove one file of the newest checkpoint."""
    any_file(step_folders(checkpoints)[0], random).unlink()


def flip_in_all(checkpoints: Path, random: Random) -> None:
    """Flip one bit in one file of every checkpoint."""
    for checkpoint in step_folders(checkpoints):
        flip_bit(any_file(checkpoint, random), random)
