"""Convolution as a matrix product: the weights as rows, times the windows of an image as columns (im2col)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F

from gptscale.ops.minigrad.tensor import Array, Op, Tensor


@dataclass(frozen=True)
class Windows:
    """The positions of a square window of `size` x `size` pixels on an image of (height, width), for Unfold and Fold."""

    height: int
    width: int
    size: int
    stride: int = 1
    padding: int = 0

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"a window of {self.size} does not fit into {self.height} x {self.width} + {self.padding}")

    @property
    def rows(self) -> int:
        """The number of positions of the window from top to bottom."""
        return (self.height + 2 * self.padding - self.size) // self.stride + 1

    @property
    def columns(self) -> int:
        """The number of positions from left to right."""
        return (self.width + 2 * self.padding - self.size) // self.stride + 1

    def pixels(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield each pixel of the window: its number, and the rows and columns of the padded image that it covers."""
        for i in range(self.size):
            for j in range(self.size):
                down = slice(i, i + self.stride * (self.rows - 1) + 1, self.stride)
                right = slice(j, j + self.stride * (self.columns - 1) + 1, self.stride)
                yield i * self.size + j, down, right


class Unfold(Op):
    """im2col, which copies each window of an image into a column.

    (batch, channels, height, width) becomes (batch, channels * size^2, positions). A pixel is copied into each window that
    covers it, so its gradient is the sum over those copies, which is Fold.
    """

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def compute(self, x: Array) -> Array:
        w = self.windows
        padded = F.pad(x, (w.padding,) * 4)
        columns = x.new_empty(x.shape[0], x.shape[1], w.size**2, w.rows, w.columns)
        for pixel, down, right in w.pixels():
            columns[:, :, pixel] = padded[:, :, down, right]
        return columns.reshape(x.shape[0], x.shape[1] * w.size**2, w.rows * w.columns)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (Fold(self.windows)(out_grad),)


class Fold(Op):
    """col2im, which adds the windows up at their positions on the image.

    It is linear and the transpose of Unfold, so each of the two is the gradient of the other.
    """

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def compute(self, columns: Array) -> Array:
        w = self.windows
        batch, channels = columns.shape[0], columns.shape[1] // w.size**2
        columns = columns.reshape(batch, channels, w.size**2, w.rows, w.columns)
        padded = columns.new_zeros(batch, channels, w.height + 2 * w.padding, w.width + 2 * w.padding)
        for pixel, down, right in w.pixels():
            padded[:, :, down, right] += columns[:, :, pixel]
        return padded[:, :, w.padding : w.padding + w.height, w.padding : w.padding + w.width]

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (Unfold(self.windows)(out_grad),)


def conv2d(x: Tensor, weight: Tensor, bias: Tensor, *, stride: int = 1, padding: int = 0) -> Tensor:
    """Return the product of each window of `x` with each filter of `weight`, plus `bias`.

    x: (batch, in_channels, height, width). weight: (out_channels, in_channels, size, size). bias: (out_channels,).
    """
    batch, _, height, width = x.shape
    out_channels, in_channels, size, _ = weight.shape
    windows = Windows(height, width, size, stride, padding)
    filters = weight.reshape(out_channels, in_channels * size**2)
    y = filters @ Unfold(windows)(x) + bias.reshape(out_channels, 1)
    return y.reshape(batch, out_channels, windows.rows, windows.columns)
