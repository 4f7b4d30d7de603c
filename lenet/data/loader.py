"""Loaders of image batches in an order fixed by (seed, epoch): a fast one on the device, and torch's DataLoader with PIL.

Both loaders go through an epoch in the same way. With a global batch of B images, step s takes the places [s B, (s + 1) B) of the
epoch's order, and rank r takes the r-th equal part of them. An incomplete last batch is left out. The next epoch has another
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from gptscale.common.data.order import permuted
from gptscale.common.errors import ConfigError, DataError
from gptscale.lenet.data.augment import AUGMENTATIONS, augment, draw
from gptscale.lenet.data.sources import LabelledImages

# Images that are augmented at once. For a batch of 32 the calls would cost more than the arithmetic.
CHUNK = 1024


@dataclass(frozen=True)
class BatchOrder:
    """The order in which a rank takes the training images.

    Raises ConfigError for a global batch that the ranks cannot share equally, DataError for fewer images than one batch.
    """

    n_images: int
    global_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        batch, ranks = self.global_batch_size, self.world_size
        if batch % ranks:
            below, above = batch // ranks * ranks, -(-batch // ranks) * ranks
            sizes = f"{below} or {above}" if below else f"{above}"
            what = f"global batch {batch} is not divisible by {ranks} ranks"
            raise ConfigError(what, "in --batch-size", f"use {sizes}")
        if self.n_images < batch:
            what = f"{self.n_images} training images, expected at least one batch of {batch}"
            raise DataError(what, "in --data", "lower --batch-size")

    @property
    def steps_per_epoch(self) -> int:
        return self.n_images // self.global_batch_size

    @property
    def share(self) -> int:
        """The number of images of one rank in one step."""
        return self.global_batch_size // self.world_size

    def order(self, epoch: int) -> np.ndarray:
        """Return the indices of the images (n_images,) in the order of 0-based `epoch`."""
        return permuted(np.arange(self.n_images, dtype=np.int64), self.n_images, self.seed, epoch)

    def places(self, step: int) -> slice:
        """Return this rank's places in the order of an epoch, for the epoch's 0-based `step`."""
        begin = step * self.global_batch_size + self.rank * self.share
        return slice(begin, begin + self.share)


@dataclass(frozen=True)
class Normalise:
    """The step from uint8 images to the floating-point tensor that a model takes.

    It is torchvision's Normalize(.5, .5): (x / 255 - 0.5) / 0.5, which gives -1 to 1.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        x = images.to(self.device, torch.float32, memory_format=self.memory_format)
        return x.mul_(2 / 255).sub_(1).to(self.dtype)


class FastLoader:
    """A loader that keeps all images as one uint8 tensor on the device, and indexes, augments and normalises them there."""

    def __init__(self, part: LabelledImages, batch_order: BatchOrder, normalise: Normalise, augmentation: str) -> None:
        self.batch_order, self.normalise, self.ranges = batch_order, normalise, AUGMENTATIONS[augmentation]
        self.images, self.labels = part.images.to(normalise.device), part.labels.to(normalise.device)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's (images, labels), on the device, of the steps from `first_step` to the end of 0-based `epoch`.

        Several batches are prepared at once.
        """
        batch_order, device = self.batch_order, self.normalise.device
        order = torch.from_numpy(batch_order.order(epoch)).to(device)
        draws = None if self.ranges is None else draw(batch_order.n_images, batch_order.seed, epoch, device)
        steps_per_chunk = max(1, CHUNK // batch_order.share)
        for first in range(first_step, batch_order.steps_per_epoch, steps_per_chunk):
            steps = range(first, min(first + steps_per_chunk, batch_order.steps_per_epoch))
            places = torch.cat([torch.arange(s.start, s.stop) for s in map(batch_order.places, steps)]).to(device)
            chosen = order[places]
            images, labels = self.images[chosen], self.labels[chosen]
            if self.ranges is not None and draws is not None:
                images = augment(images, self.ranges, draws[places])
            parts = (part.split(batch_order.share) for part in (self.normalise(images), labels))
            yield from zip(*parts, strict=True)


class _PilDataset(Dataset[tuple[Tensor, int]]):
    """Images that go one at a time through torchvision's transforms, with random numbers fixed by seed, epoch and place."""

    def __init__(self, part: LabelledImages, transform: Any, seed: int) -> None:
        self.images, self.labels, self.transform, self.seed = part.images, part.labels, transform, seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: Any) -> tuple[Tensor, int]:
        from PIL import Image

        epoch, place, index = key
        torch.default_generator.manual_seed(((self.seed * 1_000_003 + epoch) * 100_003 + place) % 2**63)
        pixels = self.images[index]
        image = Image.fromarray(pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).numpy())
        return self.transform(image), int(self.labels[index])


class _EpochSampler(Sampler[list[tuple[int, int, int]]]):
    """The keys (epoch, place, index) of a rank's batches in one epoch, from `first_step` on."""

    def __init__(self, batch_order: BatchOrder) -> None:
        self.batch_order, self.current_epoch, self.first_step = batch_order, 0, 0

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        order = self.batch_order.order(self.current_epoch)
        for step in range(self.first_step, self.batch_order.steps_per_epoch):
            places = self.batch_order.places(step)
            yield [(self.current_epoch, place, int(order[place])) for place in range(places.start, places.stop)]


class PilLoader:
    """torch's DataLoader with torchvision's transforms on one PIL image at a time, the usual way, kept for comparison."""

    def __init__(
        self, part: LabelledImages, batch_order: BatchOrder, normalise: Normalise, augmentation: str, num_workers: int
    ) -> None:
        self.normalise, self.sampler = normalise, _EpochSampler(batch_order)
        dataset = _PilDataset(part, pil_transform(augmentation, part.images.shape[-1]), batch_order.seed)
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self.sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=normalise.device.type == "cuda",
            # Without a generator of its own the DataLoader draws from the global one.
            generator=torch.Generator().manual_seed(batch_order.seed),
        )

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches as FastLoader does.

        Without worker processes this changes the state of torch's global generator. A model with dropout must seed it itself.
        """
        self.sampler.current_epoch, self.sampler.first_step = epoch, first_step
        normalise = self.normalise
        for images, labels in self.loader:
            x = images.to(normalise.device, normalise.dtype, memory_format=normalise.memory_format, non_blocking=True)
            yield x, labels.to(normalise.device, non_blocking=True)


def pil_transform(augmentation: str, side: int) -> Any:
    """Return torchvision's transforms for one PIL image: augmentation, ToTensor, Normalize(.5, .5).

    Raises ConfigError if torchvision is not installed.
    """
    try:
        from torchvision import transforms
    except ImportError:
        fix = "pip install 'gptscale[lenet]', or --loader fast"
        raise ConfigError("torchvision is not installed", "in --loader dataloader", fix) from None
    crop = [transforms.RandomCrop(side, padding=side // 8), transforms.RandomHorizontalFlip()]
    steps = {
        "none": [],
        "affine": [transforms.RandomAffine(15, (0.1, 0.1), (0.8, 1.2))],
        "mild": [transforms.RandomAffine(8, (0.06, 0.06), (0.92, 1.08))],
        "flip": crop,
        "jitter": [*crop, transforms.ColorJitter(0.2, 0.2, 0.2), transforms.RandomRotation(15)],
    }[augmentation]
    return transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])


def rank_part(n: int, rank: int, world_size: int) -> slice:
    """Return the contiguous part of n test images that a rank evaluates. All parts together hold each image once."""
    return slice(n * rank // world_size, n * (rank + 1) // world_size)
