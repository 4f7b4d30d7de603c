"""The vision models by name, and the small ones themselves: LeNet-5, the reports' networks, and repeated convolutions.

deep.py holds the larger models. Every builder takes an `ImageShape` and the name of an activation. Its model takes
images (batch, channels, side, side), with a side of 28 or 32 (resnet18: also 16), and returns logits (batch, n_classes).
docs/lenet/README.md says which reports are meant.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from gptscale.common.settings.checks import check_name
from gptscale.lenet.models import ImageShape, check_side
from gptscale.lenet.models.activations import Activation, activation
from gptscale.lenet.models.deep import CONVOLUTIONS, resnet18, vgg
from gptscale.ops.conv import conv_bias_relu
from gptscale.ops.max_pool import max_pool2d


def activated(convolution: nn.Module, act: Activation, x: Tensor, *, fused: bool) -> Tensor:
    """Apply the convolution and then `act`.

    With `fused`, convolution, bias and ReLU are one operator of gptscale.ops. Other activations are never fused.
    """
    if fused and act.name == "relu":
        assert isinstance(convolution, nn.Conv2d)
        assert convolution.bias is not None
        padding = tuple(map(int, convolution.padding))
        return conv_bias_relu(x, convolution.weight, convolution.bias, convolution.stride, padding)
    return act(convolution(x))  # type: ignore[no-any-return]


class CustomMaxPool2d(nn.MaxPool2d):
    """nn.MaxPool2d by the operator of gptscale.ops.

    For backward it keeps one byte for each window, where torch's operator keeps eight bytes and the input.
    """

    def forward(self, input: Tensor) -> Tensor:
        return max_pool2d(input, self.kernel_size, self.stride, self.padding)


class LeNet5(nn.Module):
    """LeNet-5 as it is taught today, 61,706 parameters on MNIST.

    Two 5x5 convolutions with max pooling and three linear layers: LeCun et al. 1998, fig. 2, with max pooling, full connections
    and a softmax. Images of 28 pixels are padded by 2. The activation comes after pooling. For ReLU, and for any other function
    that never falls, the result is the same at a quarter of the activation's work.
    """

    def __init__(self, shape: ImageShape, gelu: str | None) -> None:
        super().__init__()
        # GELU falls and rises again below zero, so there the order of pooling and activation matters.
        self.pools_first = gelu is None
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
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


class Subsampling(nn.Module):
    """The S layers of LeNet-5: the mean of each 2x2 field, times one trainable coefficient per channel, plus one bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.coefficient, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x) * self.coefficient.view(-1, 1, 1) + self.bias.view(-1, 1, 1)  # type: ignore[no-any-return]


# The maps of S2 (of six) that each of the 16 maps of C3 is connected to: LeCun et al. 1998, table I.
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
        return self._conv_forward(input, self.weight * self.sees, self.bias)  # type: ignore[no-any-return]


class ClassicLeNet5(nn.Module):
    """LeNet-5 of 1998 with trainable subsampling, the partial connections of C3 and scaled tanh.

    It ends in a softmax instead of the original's RBF units.
    """

    def __init__(self, shape: ImageShape, gelu: str | None) -> None:
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
        return self.layers(x)  # type: ignore[no-any-return]


def pure_linear(shape: ImageShape, gelu: str | None) -> nn.Module:
    """Return two linear layers with 128 units between them, the smallest model of report B."""
    n = shape.channels * shape.side**2
    return nn.Sequential(nn.Flatten(), nn.Linear(n, 128), activation(gelu), nn.Linear(128, shape.n_classes))


def simple_conv(shape: ImageShape, gelu: str | None) -> nn.Module:
    """Return one convolution and two linear layers, the second model of report B."""
    n = 8 * (shape.side // 2) ** 2
    return nn.Sequential(
        nn.Conv2d(shape.channels, 8, 3, padding=1), activation(gelu), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(n, 128), activation(gelu), nn.Linear(128, shape.n_classes),
    )  # fmt: skip


def _stage(inputs: int, outputs: int, gelu: str | None) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), activation(gelu), nn.MaxPool2d(2)]


def cnn(shape: ImageShape, gelu: str | None) -> nn.Module:
    """Return the network for the batch size and backend studies of report D.

    Three 3x3 convolutions (32, 64, 128 channels) with batch norm and pooling, then two linear layers. The report gives the
    training settings and the memory but not the layers, so these layers are this package's choice.
    """
    n = 128 * (shape.side // 8) ** 2
    return nn.Sequential(
        *_stage(shape.channels, 32, gelu), *_stage(32, 64, gelu), *_stage(64, 128, gelu), nn.Flatten(),
        nn.Linear(n, 256), activation(gelu), nn.Dropout(0.3), nn.Linear(256, shape.n_classes),
    )  # fmt: skip


class Convolutions(nn.Module):
    """`depth` 3x3 convolutions one after another, each with its activation, then one linear layer.

    shared: all convolutions but the first have the same weights, as in the 10-layer network of report D, which learned nothing
    there. Weights that are applied nine times scale the signal by the ninth power of one layer's scale. Without `shared` each
    convolution has weights of its own. With `fused` set, convolution, bias and ReLU are one operator of gptscale.ops.
    """

    def __init__(self, shape: ImageShape, gelu: str | None, *, depth: int, shared: bool, channels: int = 16) -> None:
        super().__init__()
        self.depth, self.fused = depth, False
        self.first = nn.Conv2d(shape.channels, channels, 3, padding=1)
        n_distinct = 1 if shared else depth - 1
        self.rest = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(n_distinct))
        self.act = activation(gelu)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(channels * (shape.side // 4) ** 2, shape.n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(activated(self.first, self.act, x, fused=self.fused))
        for i in range(self.depth - 1):
            x = activated(self.rest[i % len(self.rest)], self.act, x, fused=self.fused)
        return self.head(self.pool(x).flatten(1))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[ImageShape, str | None], nn.Module]] = {
    "lenet": LeNet5,
    "lenet_classic": ClassicLeNet5,
    "pure_linear": pure_linear,
    "simple_conv": simple_conv,
    "cnn": cnn,
    "conv2_shared": partial(Convolutions, depth=2, shared=True),
    "conv2_independent": partial(Convolutions, depth=2, shared=False),
    "conv10_shared": partial(Convolutions, depth=10, shared=True),
    "conv10_independent": partial(Convolutions, depth=10, shared=False),
    **{f"vgg{depth}": partial(vgg, depth=depth) for depth in CONVOLUTIONS},
    "vgg19_quarter": partial(vgg, depth=19, narrower=4),
    "resnet18": resnet18,
}


def with_custom_operators(model: nn.Module) -> nn.Module:
    """Give `model` this package's max pooling and, where it can fuse, the fused convolutions, and return it."""
    for module in list(model.modules()):
        if isinstance(module, (LeNet5, Convolutions)):
            module.fused = True
        for name, child in list(module.named_children()):
            if type(child) is nn.MaxPool2d:
                setattr(module, name, CustomMaxPool2d(child.kernel_size, child.stride, child.padding))
    return model


def build_model(
    name: str, shape: ImageShape, *, gelu: str | None = None, custom: bool = False, seed: int = 0
) -> nn.Module:
    """Build a model with torch's own initial weights, which depend on `seed` alone.

    The state of the caller's random generator does not change. custom: use this package's operators where they fit.
    Raises ConfigError for an unknown name, and for a side that the model does not take.
    """
    check_name(name, MODELS, "model", "in --model")
    check_side(name, shape.side, f"images of {shape.side} pixels")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = MODELS[name](shape, gelu)
    return with_custom_operators(model) if custom else model
