"""Random augmentation of a whole batch at once, by tensor operations on whatever device holds the images.

What is random is drawn for all images of an epoch from a generator seeded by (seed, epoch): the k-th image of an epoch is
changed alike whatever the batch size, the number of ranks, or the step a run was resumed at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Augmentation = Literal["none", "affine", "mild", "flip", "jitter"]
DRAWS = 8  # random numbers per image: angle, two shifts, scale, flip, brightness, contrast, saturation


@dataclass(frozen=True)
class Recipe:
    """Ranges of what may happen to an image, as torchvision's transforms name them.

    degrees: of rotation, either way. translate: largest shift as a fraction of the side. scale: factor of size. flip: whether
    half of the images are mirrored. jitter: largest relative change of brightness, contrast and saturation.
    """

    degrees: float = 0.0
    translate: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    flip: bool = False
    jitter: float = 0.0


RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "affine": Recipe(degrees=15, translate=0.1, scale=(0.8, 1.2)),  # RandomAffine(15, (.1, .1), (.8, 1.2))
    "mild": Recipe(degrees=8, translate=0.06, scale=(0.92, 1.08)),  # RandomAffine(8, (.06, .06), (.92, 1.08))
    "flip": Recipe(translate=0.125, flip=True),  # RandomCrop(32, padding=4), RandomHorizontalFlip()
    "jitter": Recipe(
        degrees=15, translate=0.125, flip=True, jitter=0.2
    ),  # and RandomRotation(15), ColorJitter(.2, .2, .2)
}


def draw(n: int, seed: int, epoch: int, device: torch.device) -> Tensor:
    """Uniform random numbers in [0, 1) for the n images of an epoch, (n, DRAWS); drawn on the CPU, so alike everywhere."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.rand(n, DRAWS, generator=generator).to(device)


def augment(images: Tensor, recipe: Recipe, draws: Tensor) -> Tensor:
    """Changed copies of uint8 `images` (batch, channels, side, side), by rows of `draws`; what moves in from outside is 0.

    Pixels are taken from the nearest source pixel, as torchvision's RandomAffine does by default.
    """
    changed = _moved(images, *_inverse(recipe, draws, images.shape[-1]))
    return _jittered(changed, recipe.jitter, draws[:, 5:8]) if recipe.jitter else changed


def _inverse(recipe: Recipe, draws: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """From a pixel of the result to its source, counted from the centre: matrices (batch, 2, 2), shifts (batch, 2) in pixels.

    torchvision.transforms.functional._get_inverse_affine_matrix, without shear: whole pixels of shift, undone first.
    """
    angle = (draws[:, 0] * 2 - 1) * math.radians(recipe.degrees)
    shift = torch.round((draws[:, 1:3] * 2 - 1) * (recipe.translate * side))
    low, high = recipe.scale
    inverse_scale = 1 / (low + (high - low) * draws[:, 3])
    cosine, sine = torch.cos(angle) * inverse_scale, torch.sin(angle) * inverse_scale
    matrix = torch.stack([torch.stack([cosine, sine], 1), torch.stack([-sine, cosine], 1)], 1)
    shift = -(matrix @ shift[:, :, None])[:, :, 0]
    if recipe.flip:
        mirror = torch.where(draws[:, 4] < 0.5, -1.0, 1.0)
        matrix = matrix * torch.stack([mirror, torch.ones_like(mirror)], 1)[:, :, None]
        shift = shift * torch.stack([mirror, torch.ones_like(mirror)], 1)
    return matrix, shift


def _moved(images: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
    """Each image through its affine map: one gather of uint8 from images with a frame of one black pixel around them."""
    n, channels, side, _ = images.shape
    centred = torch.arange(side, device=images.device) - (side - 1) / 2
    middle = (side - 1) / 2 + 1.5  # a pixel of frame, and half a pixel, so that cutting off the fraction rounds
    places = []
    for row in range(2):  # x of the source, then y
        by_x = matrix[:, row, 0, None] * centred
        by_y = matrix[:, row, 1, None] * centred + (shift[:, row, None] + middle)
        places.append((by_y[:, :, None] + by_x[:, None, :]).clamp_(0, side + 1).to(torch.int32))
    source = (places[1] * (side + 2) + places[0]).view(n, 1, side * side).to(torch.int64)
    framed = F.pad(images, (1, 1, 1, 1)).view(n, channels, (side + 2) ** 2)
    return framed.gather(2, source.expand(-1, channels, -1)).view(n, channels, side, side)


def _jittered(images: Tensor, jitter: float, draws: Tensor) -> Tensor:
    """Brightness, then contrast, then saturation, each by a factor within 1 - jitter and 1 + jitter, cut to 0 to 255."""
    brightness, contrast, saturation = ((1 + jitter * (2 * draws - 1))[:, i].view(-1, 1, 1, 1) for i in range(3))
    x = (images.float() * brightness).clamp_(0, 255)
    x = torch.lerp(_grey(x).mean((2, 3), keepdim=True), x, contrast).clamp_(0, 255)
    if x.shape[1] == 3:
        x = torch.lerp(_grey(x), x, saturation).clamp_(0, 255)
    return x.round_().to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Luma as (batch, 1, side, side), by the weights of ITU-R 601-2."""
    if images.shape[1] == 1:
        return images
    weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True)
