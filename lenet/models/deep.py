"""The deep models, for images of 28 or 32 pixels: VGG with one linear layer, and ResNet-18, which takes 16 pixels too.

Simonyan & Zisserman 2014 (arXiv 1409.1556), table 1, columns A, B, D, E: convolutions with batch norm. Five poolings reduce 32
pixels to one. The three linear layers of the original, made for 7x7 pixels, are therefore one here, as is usual for CIFAR-10.
He et al. 2015 (arXiv 1512.03385): the blocks of table 1, and the stem of section 4.2, a 3x3 convolution without pooling.
"""

from __future__ import annotations

from torch import Tensor, nn

from gptscale.lenet.models import ImageShape
from gptscale.lenet.models.activations import activation

WIDTHS = (64, 128, 256, 512, 512)
# Depth of the network: number of convolutions of each width.
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(shape: ImageShape, gelu: str | None, *, depth: int, narrower: int = 1) -> nn.Module:
    """Return VGG with `depth` layers (11, 13, 16 or 19), which pads images of 28 pixels to 32.

    narrower: what the channels of all layers are divided by.
    """
    layers: list[nn.Module] = [nn.ZeroPad2d((32 - shape.side) // 2)] if shape.side < 32 else []
    channels, widths = shape.channels, [width // narrower for width in WIDTHS]
    for width, count in zip(widths, CONVOLUTIONS[depth], strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), activation(gelu)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1], shape.n_classes))
    for module in model.modules():
        # With torch's default initial weights the signal would be lost after nineteen layers.
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut past them, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, gelu: str | None) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.act = activation(gelu)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.second(self.act(self.norm1(self.first(x)))))
        result: Tensor = self.act(branch + self.shortcut(x))
        return result


def resnet18(shape: ImageShape, gelu: str | None) -> nn.Module:
    """Return ResNet-18, 11.2 million parameters.

    It has a stem, four stages of two blocks (64, 128, 256, 512 channels), a global mean and one linear layer.
    """
    stem = nn.Conv2d(shape.channels, 64, 3, padding=1, bias=False)
    layers, inputs = [stem, nn.BatchNorm2d(64), activation(gelu)], 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [BasicBlock(inputs, width, stride, gelu), BasicBlock(width, width, 1, gelu)]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, shape.n_classes))
