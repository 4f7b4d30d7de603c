"""Batches of images in an order that (seed, epoch) fixes: from one tensor on the device, or by torch's DataLoader and PIL.

Both loaders walk through an epoch alike: the images of step s are places [s B, (s + 1) B) of the epoch's order, B the global
batch, and rank r takes the r-th equal part. A last batch that is not whole is left out; the next epoch has another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from gptscale.common.data.order import permuted
from gptscale.common.errors import ConfigError, DataError
from gptscale.lenet.data.augment import RECIPES, augment, draw
from gptscale.lenet.data.sources import Part

CHUNK = 1024  # images that are augmented at once; for a batch of 32 the calls would cost more than the arithmetic


@dataclass(frozen=True)
class Walk:
    """How a rank walks through its epochs."""

    n_images: int
    global_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        b, w = self.global_batch_size, self.world_size
        if b % w:
            fits = f"{b // w * w} or {-(-b // w) * w}" if b >= w else f"{w}"
            raise ConfigError(f"global batch {b} is not divisible by {w} ranks", "in --batch-size", f"use {fits}")
        if self.n_images < b:
            raise DataError(
                f"{self.n_images} training images, expected at least one batch of {b}",
                "in --data",
                "lower --batch-size",
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.n_images // self.global_batch_size

    @property
    def share(self) -> int:
        """Images of one rank in one step."""
        return self.global_batch_size // self.world_size

    def order(self, epoch: int) -> np.ndarray:
        """Indices of the images at all places of 0-based `epoch`."""
        return permuted(np.arange(self.n_images, dtype=np.int64), self.n_images, self.seed, epoch)

    def places(self, step: int) -> slice:
        """This rank's places in the order of an epoch, for the epoch's 0-based `step`."""
        begin = step * self.global_batch_size + self.rank * self.share
        return slice(begin, begin + self.share)


class Loader(Protocol):
    """Yields this rank's (images, labels) of the steps from `first_step` on to the end of 0-based `epoch`, on the device."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]: ...


class Normalise:
    """uint8 to floating point, (x / 255 - mean) / std, per channel; by default Normalize(.5, .5), which gives -1 to 1."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype = torch.float32, layout: str = "channels_first"
    ) -> None:
        self.device, self.dtype = device, dtype
        self.format = torch.channels_last if layout == "channels_last" else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        x = images.to(self.device, torch.float32, memory_format=self.format)
        return x.mul_(2 / 255).sub_(1).to(self.dtype)


class FastLoader:
    """The whole part as one uint8 tensor on the device; batches are indexed, augmented and normalised there."""

    def __init__(self, part: Part, walk: Walk, normalise: Normalise, augmentation: str) -> None:
        self.walk, self.normalise, self.recipe = walk, normalise, RECIPES[augmentation]
        self.images, self.labels = part.images.to(normalise.device), part.labels.to(normalise.device)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See Loader. Several batches are made ready together."""
        walk, device = self.walk, self.normalise.device
        order = torch.from_numpy(walk.order(epoch)).to(device)
        draws = None if self.recipe is None else draw(walk.n_images, walk.seed, epoch, device)
        together = max(1, CHUNK // walk.share)
        for first in range(first_step, walk.steps_per_epoch, together):
            steps = range(first, min(first + together, walk.steps_per_epoch))
            places = torch.cat([torch.arange(s.start, s.stop) for s in map(walk.places, steps)]).to(device)
            chosen = order[places]
            images, labels = self.images[chosen], self.labels[chosen]
            if self.recipe is not None and draws is not None:
                images = augment(images, self.recipe, draws[places])
            yield from zip(self.normalise(images).split(walk.share), labels.split(walk.share), strict=True)


class _PilDataset(Dataset[tuple[Tensor, int]]):
    """One image at a time through torchvision's transforms; what they draw is fixed by seed, epoch and place."""

    def __init__(self, part: Part, transform: Any, seed: int) -> None:
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
    """The keys (epoch, place, index) of a rank's batches, from `first_step` on."""

    def __init__(self, walk: Walk) -> None:
        self.walk, self.now, self.first_step = walk, 0, 0

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        order = self.walk.order(self.now)
        for step in range(self.first_step, self.walk.steps_per_epoch):
            places = self.walk.places(step)
            yield [(self.now, place, int(order[place])) for place in range(places.start, places.stop)]


class PilLoader:
    """torch's DataLoader with torchvision's transforms on PIL images, one by one: the usual way, kept for comparison."""

    def __init__(self, part: Part, walk: Walk, normalise: Normalise, augmentation: str, num_workers: int) -> None:
        self.normalise, self.sampler = normalise, _EpochSampler(walk)
        dataset = _PilDataset(part, pil_transform(augmentation, part.images.shape[-1]), walk.seed)
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self.sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=normalise.device.type == "cuda",
            generator=torch.Generator().manual_seed(walk.seed),  # or else the global one is drawn from
        )

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See Loader. Without workers it moves torch's global generator, which a model with dropout must seed itself."""
        self.sampler.now, self.sampler.first_step = epoch, first_step
        normalise = self.normalise
        for images, labels in self.loader:
            x = images.to(normalise.device, normalise.dtype, memory_format=normalise.format, non_blocking=True)
            yield x, labels.to(normalise.device, non_blocking=True)


def pil_transform(augmentation: str, side: int) -> Any:
    """torchvision's transforms of the texts for one PIL image: augmentation, ToTensor, Normalize(.5, .5)."""
    try:
        from torchvision import transforms
    except ImportError:
        raise ConfigError(
            "torchvision is not installed", "in --loader dataloader", "pip install 'gptscale[lenet]', or --loader fast"
        ) from None
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
    """The contiguous part of n test images that a rank evaluates; all parts together are each image once."""
    return slice(n * rank // world_size, n * (rank + 1) // world_size)
