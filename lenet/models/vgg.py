"""VGG for images of 28 or 32 pixels: the convolutions of Simonyan & Zisserman with batch norm, and one linear layer.

Simonyan & Zisserman 2014 (arXiv 1409.1556), table 1, columns A, B, D, E. Five poolings reduce 32 pixels to one. The three
linear layers of the original, made for 7x7 pixels, are therefore one here, as is usual for CIFAR-10.
"""

from __future__ import annotations

from torch import nn

from gptscale.lenet.models.activations import activation

WIDTHS = (64, 128, 256, 512, 512)
# Depth of the network: number of convolutions of each width.
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(depth: int, channels: int, side: int, n_classes: int, gelu: str | None, narrower: int = 1) -> nn.Module:
    """Return VGG with `depth` layers (11, 13, 16 or 19), which pads images of 28 pixels to 32.

    narrower: what the channels of all layers are divided by.
    """
    layers: list[nn.Module] = [nn.ZeroPad2d((32 - side) // 2)] if side < 32 else []
    widths = [width // narrower for width in WIDTHS]
    for width, count in zip(widths, CONVOLUTIONS[depth], strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), activation(gelu)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1], n_classes))
    for module in model.modules():
        # With torch's default initial weights the signal would be lost after nineteen layers.
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
