"""ResNet-18 for images of 16, 28 or 32 pixels: a 3x3 convolution without pooling, then the eight blocks of the original.

He et al. 2015 (arXiv 1512.03385): the blocks of table 1, the small-image stem of section 4.2.
"""

from __future__ import annotations

from torch import Tensor, nn

from gptscale.lenet.models.activations import activation


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


def resnet18(channels: int, n_classes: int, gelu: str | None) -> nn.Module:
    """Return ResNet-18, 11.2 million parameters.

    It has a stem, four stages of two blocks (64, 128, 256, 512 channels), a global mean and one linear layer.
    """
    layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), activation(gelu)]
    inputs = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [BasicBlock(inputs, width, stride, gelu), BasicBlock(width, width, 1, gelu)]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, n_classes))
