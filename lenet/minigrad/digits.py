"""The images of the autograd experiment: MNIST from a folder, or the digits that come with scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gptscale.common.errors import ConfigError, DataError
from gptscale.lenet.data.idx import is_idx_folder
from gptscale.lenet.data.sources import LabelledImages, open_data
from gptscale.lenet.minigrad.training import Samples

# Side of the images in pixels, which the models are made for.
SIDE = 28
CLASSES = 10
DOWNLOAD = "python -c \"from torchvision.datasets import MNIST; MNIST('data', download=True)\""


@dataclass(frozen=True)
class Digits:
    """Images for training and for testing.

    is_whole_mnist: whether they are all of MNIST, on which report B's figures were measured.
    """

    name: str
    train: Samples
    test: Samples
    is_whole_mnist: bool


def open_digits(data: str, train_samples: int | None = None) -> Digits:
    """Open `digits`, or a folder with MNIST's four idx files or with MNIST/raw, as torchvision leaves it.

    train_samples: number of training images, the first ones, or None for all.
    Raises ConfigError when there is no such folder, DataError for files that are not what they should be.
    """
    source = data if data == "digits" else str(_folder(Path(data)))
    data_set = open_data(source, root=Path(source), image_size=SIDE)
    if data_set.channels != 1 or len(data_set.classes) != CLASSES:
        shape = f"{data_set.channels} channels and {len(data_set.classes)} classes"
        raise DataError(f"images with {shape}", f"in {data}", "give grey images of the ten digits")
    if train_samples is not None and train_samples > len(data_set.train):
        raise ConfigError(
            f"{train_samples} of {len(data_set.train)} images", "in --train-samples", f"use 1 to {len(data_set.train)}"
        )
    train, test = _samples(data_set.train), _samples(data_set.test)
    train = Samples(train.images[:train_samples], train.labels[:train_samples])
    has_all_images = (len(train), len(test)) == (60_000, 10_000)
    return Digits(data_set.name, train, test, is_whole_mnist=has_all_images and data_set.name == "MNIST")


def _folder(path: Path) -> Path:
    for folder in (path, path / "MNIST" / "raw", path / "raw"):
        if folder.is_dir() and is_idx_folder(folder):
            return folder
    raise ConfigError(
        f"no MNIST in {path}", "in --data", f"name the folder of its four idx files, or get it: {DOWNLOAD}"
    )


def _samples(part: LabelledImages) -> Samples:
    return Samples(part.images.float() / 255, part.labels)
