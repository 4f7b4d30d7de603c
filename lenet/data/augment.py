"""Random augmentation of many images at once, by tensor operations on the device that holds the images.

The random numbers of all images of an epoch come from a generator seeded by (seed, epoch). The k-th image of an epoch is changed
in the same way for every batch size and number of ranks, and after every resume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Random numbers per image: angle, two shifts, scale, flip, brightness, contrast, saturation.
DRAWS = 8


@dataclass(frozen=True)
class AugmentationRanges:
    """The ranges from which the changes of an image are drawn, named as in torchvision's transforms.

    degrees: largest rotation in either direction. translate: largest shift as a fraction of the side. scale: smallest and largest
    factor of size. flip: whether half of the images are mirrored. jitter: largest relative change of brightness, contrast and
    saturation.
    """

    degrees: float = 0.0
    translate: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    flip: bool = False
    jitter: float = 0.0


AUGMENTATIONS: dict[str, AugmentationRanges | None] = {
    "none": None,
    # RandomAffine(15, (.1, .1), (.8, 1.2))
    "affine": AugmentationRanges(degrees=15, translate=0.1, scale=(0.8, 1.2)),
    # RandomAffine(8, (.06, .06), (.92, 1.08))
    "mild": AugmentationRanges(degrees=8, translate=0.06, scale=(0.92, 1.08)),
    # RandomCrop(32, padding=4), RandomHorizontalFlip()
    "flip": AugmentationRanges(translate=0.125, flip=True),
    # the same, then RandomRotation(15), ColorJitter(.2, .2, .2)
    "jitter": AugmentationRanges(degrees=15, translate=0.125, flip=True, jitter=0.2),
}


def draw(n: int, seed: int, epoch: int, device: torch.device) -> Tensor:
    """Draw uniform random numbers in [0, 1), (n, DRAWS), for the n images of an epoch.

    They are drawn on the CPU, so that they are the same for every device.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.rand(n, DRAWS, generator=generator).to(device)


def augment(images: Tensor, ranges: AugmentationRanges, draws: Tensor) -> Tensor:
    """Return changed copies of uint8 `images` (batch, channels, side, side), one for each row of `draws`.

    Each pixel is the nearest source pixel, as with torchvision's RandomAffine by default, and 0 where the source lies outside.
    """
    moved = _moved(images, *_inverse_affine(ranges, draws, images.shape[-1]))
    return _jittered(moved, ranges.jitter, draws[:, 5:8]) if ranges.jitter else moved


def _inverse_affine(ranges: AugmentationRanges, draws: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return the map from a pixel of the result to its source pixel, as matrices (batch, 2, 2) and shifts (batch, 2).

    Both are in pixels counted from the centre. The map is torchvision.transforms.functional._get_inverse_affine_matrix without
    shear: the shift is a whole number of pixels and is undone first.
    """
    angle = (draws[:, 0] * 2 - 1) * math.radians(ranges.degrees)
    shift = torch.round((draws[:, 1:3] * 2 - 1) * (ranges.translate * side))
    low, high = ranges.scale
    inverse_scale = 1 / (low + (high - low) * draws[:, 3])
    cosine, sine = torch.cos(angle) * inverse_scale, torch.sin(angle) * inverse_scale
    matrix = torch.stack([torch.stack([cosine, sine], 1), torch.stack([-sine, cosine], 1)], 1)
    shift = -(matrix @ shift[:, :, None])[:, :, 0]
    if ranges.flip:
        mirror = torch.where(draws[:, 4] < 0.5, -1.0, 1.0)
        matrix = matrix * torch.stack([mirror, torch.ones_like(mirror)], 1)[:, :, None]
        shift = shift * torch.stack([mirror, torch.ones_like(mirror)], 1)
    return matrix, shift


def _moved(images: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
    """Move each image by its affine map.

    This is one gather of uint8 pixels from images with a frame of one black pixel around them.
    """
    n, channels, side, _ = images.shape
    centred = torch.arange(side, device=images.device) - (side - 1) / 2
    # One pixel for the frame, and half a pixel so that cutting off the fraction rounds to the nearest pixel.
    middle = (side - 1) / 2 + 1.5
    # x of the source pixels, then y
    source_xy = []
    for row in range(2):
        by_x = matrix[:, row, 0, None] * centred
        by_y = matrix[:, row, 1, None] * centred + (shift[:, row, None] + middle)
        source_xy.append((by_y[:, :, None] + by_x[:, None, :]).clamp_(0, side + 1).to(torch.int32))
    source = (source_xy[1] * (side + 2) + source_xy[0]).view(n, 1, side * side).to(torch.int64)
    framed = F.pad(images, (1, 1, 1, 1)).view(n, channels, (side + 2) ** 2)
    return framed.gather(2, source.expand(-1, channels, -1)).view(n, channels, side, side)


def _jittered(images: Tensor, jitter: float, draws: Tensor) -> Tensor:
    """Change brightness, then contrast, then saturation, each by a factor from 1 - jitter to 1 + jitter, and clamp to 0-255."""
    factors = 1 + jitter * (2 * draws - 1)
    brightness, contrast, saturation = (factor.view(-1, 1, 1, 1) for factor in factors.unbind(1))
    x = (images.float() * brightness).clamp_(0, 255)
    x = torch.lerp(_grey(x).mean((2, 3), keepdim=True), x, contrast).clamp_(0, 255)
    if x.shape[1] == 3:
        x = torch.lerp(_grey(x), x, saturation).clamp_(0, 255)
    return x.round_().to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Return the luma (batch, 1, side, side) with the weights of ITU-R 601-2."""
    if images.shape[1] == 1:
        return images
    weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True)
