"""The vision models by name; here LeNet-5, the small networks of the texts, and the repeated convolutions.

vgg.py and resnet.py hold the larger ones. Every builder takes a `Shape` and an activation by name, and returns logits of
(batch, n_classes) for images of (batch, channels, side, side), side 28 or 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import did_you_mean
from gptscale.lenet.models.activations import Activation, activation
from gptscale.lenet.models.resnet import resnet18
from gptscale.lenet.models.vgg import vgg
from gptscale.ops.conv import conv_bias_relu
from gptscale.ops.max_pool import max_pool2d

SIDES = (28, 32)


@dataclass(frozen=True)
class Shape:
    """What a model is given and asked for: square images of `side` pixels, `channels` (1 or 3), `n_classes`."""

    channels: int
    side: int
    n_classes: int


def activated(convolution: nn.Module, act: Activation, x: Tensor, *, fused: bool) -> Tensor:
    """`act` of the convolution; ReLU may be `fused` with it and its bias into the one operator of gptscale.ops."""
    if fused and act.name == "relu":
        assert isinstance(convolution, nn.Conv2d)
        assert convolution.bias is not None
        return conv_bias_relu(
            x, convolution.weight, convolution.bias, convolution.stride, tuple(map(int, convolution.padding))
        )
    result: Tensor = act(convolution(x))
    return result


class CustomMaxPool2d(nn.MaxPool2d):
    """nn.MaxPool2d by the operator of gptscale.ops, which keeps a byte for each window where torch's keeps eight and x."""

    def forward(self, input: Tensor) -> Tensor:
        return max_pool2d(input, self.kernel_size, self.stride, self.padding)


class LeNet5(nn.Module):
    """LeNet-5 as it is taught today: two convolutions of 5x5 with max pooling, three linear layers; 61,706 parameters on MNIST.

    LeCun et al. 1998, fig. 2, with max pooling, whole connections and a softmax. Images of 28 pixels are padded by 2. The
    activation comes after pooling: for ReLU, and any other that never falls, that is the same, at a quarter of its work.
    """

    def __init__(self, shape: Shape, gelu: str | None) -> None:
        super().__init__()
        self.pools_first = gelu is None  # GELU falls below zero and rises again: there the order matters
        self.fused = False
        self.features = nn.ModuleList(
            [nn.Conv2d(shape.channels, 6, 5, padding=(32 - shape.side) // 2), nn.Conv2d(6, 16, 5)]
        )
        self.pool = nn.MaxPool2d(2)
        self.act = activation(gelu)
        self.head = nn.Sequential(
            nn.Linear(400, 120), activation(gelu), nn.Linear(120, 84), activation(gelu), nn.Linear(84, shape.n_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.features:
            if self.pools_first and not self.fused:
                x = self.act(self.pool(convolution(x)))
            else:
                x = self.pool(activated(convolution, self.act, x, fused=self.fused))
        result: Tensor = self.head(x.flatten(1))
        return result


class Subsampling(nn.Module):
    """LeNet-5's S layers: the mean of each 2x2 field, times one trainable coefficient per channel, plus one bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.coefficient, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.pool(x) * self.coefficient.view(-1, 1, 1) + self.bias.view(-1, 1, 1)
        return result


# Which of the six maps of S2 each of the 16 maps of C3 sees: LeCun et al. 1998, table I.
C3_SEES = ("012", "123", "234", "345", "450", "501", "0123", "1234", "2345", "3450", "4501", "5012", "0134", "1245",
           "0235", "012345")  # fmt: skip


class PartialConv2d(nn.Conv2d):
    """A 5x5 convolution of 6 maps into 16 that keeps only the connections of C3_SEES."""

    sees: Tensor

    def __init__(self) -> None:
        super().__init__(6, 16, 5)
        mask = torch.zeros(16, 6, 1, 1)
        for target, sources in enumerate(C3_SEES):
            mask[target, [int(s) for s in sources]] = 1
        self.register_buffer("sees", mask, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._conv_forward(input, self.weight * self.sees, self.bias)
        return result


class ClassicLeNet5(nn.Module):
    """LeNet-5 of 1998: trainable subsampling, the partial connections of C3, scaled tanh; a softmax instead of its RBF units."""

    def __init__(self, shape: Shape, gelu: str | None) -> None:
        super().__init__()

        def act() -> nn.Module:
            return activation(gelu, "scaled-tanh")

        self.layers = nn.Sequential(
            nn.Conv2d(shape.channels, 6, 5, padding=(32 - shape.side) // 2), Subsampling(6), act(),
            PartialConv2d(), Subsampling(16), act(),
            nn.Conv2d(16, 120, 5), act(), nn.Flatten(),
            nn.Linear(120, 84), act(), nn.Linear(84, shape.n_classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def pure_linear(shape: Shape, gelu: str | None) -> nn.Module:
    """Two linear layers, 128 units between them: text B's smallest model."""
    n = shape.channels * shape.side**2
    return nn.Sequential(nn.Flatten(), nn.Linear(n, 128), activation(gelu), nn.Linear(128, shape.n_classes))


def simple_conv(shape: Shape, gelu: str | None) -> nn.Module:
    """One convolution and two linear layers: text B's second model."""
    n = 8 * (shape.side // 2) ** 2
    return nn.Sequential(
        nn.Conv2d(shape.channels, 8, 3, padding=1), activation(gelu), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(n, 128), activation(gelu), nn.Linear(128, shape.n_classes),
    )  # fmt: skip


def _stage(inputs: int, outputs: int, gelu: str | None) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), activation(gelu), nn.MaxPool2d(2)]


def cnn(shape: Shape, gelu: str | None) -> nn.Module:
    """The network of the DDP study: three convolutions of 3x3 (32, 64, 128) with batch norm and pooling, two linear layers.

    The text gives its training and its memory but not its layers; these are ours.
    """
    n = 128 * (shape.side // 8) ** 2
    return nn.Sequential(
        *_stage(shape.channels, 32, gelu), *_stage(32, 64, gelu), *_stage(64, 128, gelu), nn.Flatten(),
        nn.Linear(n, 256), activation(gelu), nn.Dropout(0.3), nn.Linear(256, shape.n_classes),
    )  # fmt: skip


class Convolutions(nn.Module):
    """`depth` convolutions of 3x3 one after another, each with its activation, then one linear layer.

    shared: all but the first are one and the same, as in the text's 10-layer net, which learned nothing there: applied nine
    times, its weights scale the signal by the ninth power of what they should. Otherwise each has weights of its own.
    With `fused` set, convolution, bias and ReLU are the one operator of gptscale.ops.
    """

    def __init__(self, shape: Shape, gelu: str | None, *, depth: int, shared: bool, channels: int = 16) -> None:
        super().__init__()
        self.depth, self.fused = depth, False
        self.first = nn.Conv2d(shape.channels, channels, 3, padding=1)
        made = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(1 if shared else depth - 1)]
        self.rest = nn.ModuleList(made)
        self.act = activation(gelu)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(channels * (shape.side // 4) ** 2, shape.n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(activated(self.first, self.act, x, fused=self.fused))
        for i in range(self.depth - 1):
            x = activated(self.rest[i % len(self.rest)], self.act, x, fused=self.fused)
        result: Tensor = self.head(self.pool(x).flatten(1))
        return result


def _convolutions(depth: int, shared: bool) -> Callable[[Shape, str | None], nn.Module]:
    return lambda shape, gelu: Convolutions(shape, gelu, depth=depth, shared=shared)


def _vgg(depth: int) -> Callable[[Shape, str | None], nn.Module]:
    return lambda shape, gelu: vgg(depth, shape.channels, shape.side, shape.n_classes, gelu)


MODELS: dict[str, Callable[[Shape, str | None], nn.Module]] = {
    "lenet": LeNet5,
    "lenet_classic": ClassicLeNet5,
    "pure_linear": pure_linear,
    "simple_conv": simple_conv,
    "cnn": cnn,
    "conv2_shared": _convolutions(2, True),
    "conv2_independent": _convolutions(2, False),
    "conv10_shared": _convolutions(10, True),
    "conv10_independent": _convolutions(10, False),
    "vgg11": _vgg(11),
    "vgg13": _vgg(13),
    "vgg16": _vgg(16),
    "vgg19": _vgg(19),
    "resnet18": lambda shape, gelu: resnet18(shape.channels, shape.n_classes, gelu),
}


def check_model(name: str) -> None:
    """ConfigError for a name that is none of MODELS."""
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}", "in --model", did_you_mean(name, MODELS))


def with_custom_operators(model: nn.Module) -> nn.Module:
    """`model` with this package's operators wherever it pools, and fused where it can fuse."""
    for module in list(model.modules()):
        if isinstance(module, (LeNet5, Convolutions)):
            module.fused = True
        for name, child in list(module.named_children()):
            if type(child) is nn.MaxPool2d:
                setattr(module, name, CustomMaxPool2d(child.kernel_size, child.stride, child.padding))
    return model


def build_model(name: str, shape: Shape, *, gelu: str | None = None, custom: bool = False, seed: int = 0) -> nn.Module:
    """A model with torch's own initial weights, a function of `seed` alone; the caller's generator is left as it was.

    custom: by this package's operators where they fit.
    Raises ConfigError for an unknown name, and for a side that is not 28 or 32.
    """
    check_model(name)
    if shape.side not in SIDES:
        raise ConfigError(f"images of {shape.side} pixels", "in --image-size", "use 28 or 32")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = MODELS[name](shape, gelu)
    return with_custom_operators(model) if custom else model
