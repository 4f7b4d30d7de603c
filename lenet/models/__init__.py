"""The vision models: their names, and the words by which their options are asked for. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gptscale.common.errors import ConfigError

Gelu = Literal[
    "erf", "tanh", "sigmoid", "custom-erf", "custom-tanh", "custom-sigmoid", "python-erf", "python-tanh", "python-sigmoid"
]  # fmt: skip
GELUS: tuple[str, ...] = get_args(Gelu)
# Sides of the square images that every model takes, in pixels.
SIDES = (28, 32)
# ResNet-18 ends in a mean over whatever pixels are left, so it takes small images too, and half the time.
SMALL_SIDES = {"resnet18": (16,)}
MODEL_NAMES = (
    "lenet", "lenet_classic", "pure_linear", "simple_conv", "cnn", "conv2_shared", "conv2_independent", "conv10_shared",
    "conv10_independent", "vgg11", "vgg13", "vgg16", "vgg19", "vgg19_quarter", "resnet18",
)  # fmt: skip
WITH_BATCH_NORM = ("cnn", "vgg11", "vgg13", "vgg16", "vgg19", "vgg19_quarter", "resnet18")
# They have neither max pooling nor a convolution that can be fused with ReLU.
WITHOUT_CUSTOM_OPERATORS = ("lenet_classic", "pure_linear", "resnet18")


@dataclass(frozen=True)
class ImageShape:
    """The images and classes of a data set: square images of `side` pixels with 1 or 3 `channels`, and `n_classes`."""

    channels: int
    side: int
    n_classes: int


def check_side(name: str, side: int, what: str) -> None:
    """Raise ConfigError, which says `what` is wrong, unless the model takes images of `side` pixels."""
    small = SMALL_SIDES.get(name, ())
    if side not in (*small, *SIDES):
        raise ConfigError(what, "in --image-size", "use 16, 28 or 32" if small else "use 28 or 32")
