"""The images to learn from: MNIST from a folder, or without one the digits that scikit-learn brings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gptscale.common.errors import ConfigError, DataError
from gptscale.lenet.data.idx import is_idx_folder
from gptscale.lenet.data.sources import LabelledImages, open_data
from gptscale.lenet.minigrad.training import Samples

SIDE = 28  # pixels; what the models are made for
CLASSES = 10
DOWNLOAD = "python -c \"from torchvision.datasets import MNIST; MNIST('data', download=True)\""


@dataclass(frozen=True)
class Digits:
    """Images for training and for testing; `is_whole_mnist` tells whether the old figures are of the same data."""

    name: str
    train: Samples
    test: Samples
    is_whole_mnist: bool


def open_digits(data: str, train_samples: int | None = None) -> Digits:
    """`digits`, or a folder with MNIST's four idx files (or with MNIST/raw, as torchvision leaves it).

    train_samples: only so many of the training images, the first ones.
    Raises ConfigError when there is no such folder, DataError for files that are not what they should be.
    """
    source = data if data == "digits" else str(_folder(Path(data)))
    found = open_data(source, root=Path(source), image_size=SIDE)
    if found.channels != 1 or len(found.classes) != CLASSES:
        shape = f"{found.channels} channels and {len(found.classes)} classes"
        raise DataError(f"images with {shape}", f"in {data}", "give grey images of the ten digits")
    if train_samples is not None and train_samples > len(found.train):
        raise ConfigError(
            f"{train_samples} of {len(found.train)} images", "in --train-samples", f"use 1 to {len(found.train)}"
        )
    train, test = _samples(found.train), _samples(found.test)
    train = Samples(train.images[:train_samples], train.labels[:train_samples])
    whole = (len(train), len(test)) == (60_000, 10_000) and found.name == "MNIST"
    return Digits(found.name, train, test, is_whole_mnist=whole)


def _folder(given: Path) -> Path:
    for folder in (given, given / "MNIST" / "raw", given / "raw"):
        if folder.is_dir() and is_idx_folder(folder):
            return folder
    raise ConfigError(
        f"no MNIST in {given}", "in --data", f"name the folder of its four idx files, or get it: {DOWNLOAD}"
    )


def _samples(part: LabelledImages) -> Samples:
    return Samples(part.images.float() / 255, part.labels)
