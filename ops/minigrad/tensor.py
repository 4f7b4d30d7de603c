"""A tensor that remembers the operation it came from, and the arithmetic that such tensors are made with.

The numbers lie in a `torch.Tensor` that serves as a plain array: none of torch's own autograd is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Array = torch.Tensor
_recording = True


@contextmanager
def recording(on: bool) -> Iterator[None]:
    """Within it, tensors do (True) or do not (False) remember where they came from."""
    global _recording
    before, _recording = _recording, on
    try:
        yield
    finally:
        _recording = before


def is_recording() -> bool:
    """Whether tensors that are made now remember where they came from."""
    return _recording


class Op:
    """One application of an operation: how its value is computed, and how a gradient goes back through it.

    An object serves a single call, so `compute` may keep on `self` what `gradient` will need.
    """

    compute: Callable[..., Array]
    """The arrays of the inputs to the array of the output."""

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor | None, ...]:
        """For each of `node.inputs`: the derivative of the loss by it, given `out_grad`, that by the output `node`.

        It is computed with tensors, not arrays, so that it is recorded in its turn where a second derivative is wanted.
        None stands for a derivative that nobody needs.
        """
        raise NotImplementedError

    def __call__(self, *inputs: Tensor) -> Tensor:
        array = self.compute(*(tensor.array for tensor in inputs))
        if _recording and any(tensor.needs_grad for tensor in inputs):
            return Tensor(array, needs_grad=True, op=self, inputs=inputs)
        return Tensor(array)


class Tensor:
    """A node of the graph: an array, and if it was computed from something that needs a gradient, by what and from what."""

    __slots__ = ("array", "grad", "inputs", "needs_grad", "op")

    def __init__(
        self, array: Array, *, needs_grad: bool = False, op: Op | None = None, inputs: tuple[Tensor, ...] = ()
    ) -> None:
        self.array, self.needs_grad, self.op, self.inputs = array, needs_grad, op, inputs
        self.grad: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def __repr__(self) -> str:
        source = type(self.op).__name__ if self.op else "leaf"
        return f"Tensor({source}, shape {self.shape}, {str(self.array.dtype).removeprefix('torch.')})"

    def __add__(self, other: Tensor | float) -> Tensor:
        return Add()(*broadcast(self, other))

    def __mul__(self, other: Tensor | float) -> Tensor:
        return Multiply()(*broadcast(self, other))

    def __neg__(self) -> Tensor:
        return self * -1.0

    def __sub__(self, other: Tensor | float) -> Tensor:
        return self + -other

    def __rsub__(self, other: float) -> Tensor:
        return -self + other

    def __truediv__(self, other: Tensor | float) -> Tensor:
        return self * other**-1.0

    def __rtruediv__(self, other: float) -> Tensor:
        return self**-1.0 * other

    def __pow__(self, exponent: float) -> Tensor:
        return Power(exponent)(self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return MatMul()(self, other)

    __radd__, __rmul__ = __add__, __mul__

    @property
    def T(self) -> Tensor:  # noqa: N802  # as everywhere in this field
        """The last two axes exchanged."""
        return Transpose()(self)

    def reshape(self, *shape: int) -> Tensor:
        """The same numbers in another shape; one axis may be -1."""
        return Reshape(shape)(self)

    def sum(self, *axes: int, keepdim: bool = False) -> Tensor:
        """The sum over the given axes, or over all."""
        over = {axis % len(self.shape) for axis in axes or range(len(self.shape))}
        summed = sum_to(self, tuple(1 if i in over else size for i, size in enumerate(self.shape)))
        return summed if keepdim else summed.reshape(*(size for i, size in enumerate(self.shape) if i not in over))

    def mean(self) -> Tensor:
        """The mean of all elements."""
        return self.sum() * (1.0 / self.array.numel())

    def exp(self) -> Tensor:
        return Exp()(self)

    def log(self) -> Tensor:
        return Log()(self)

    def relu(self) -> Tensor:
        return ReLU()(self)


class Add(Op):
    """`a + b`: both derivatives are 1."""

    def compute(self, a: Array, b: Array) -> Array:
        return a + b

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
        return out_grad, out_grad


class Multiply(Op):
    """`a * b`, element by element: each factor is the other's derivative."""

    def compute(self, a: Array, b: Array) -> Array:
        return a * b

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor | None, ...]:
        a, b = node.inputs
        return out_grad * b if a.needs_grad else None, out_grad * a if b.needs_grad else None


class Power(Op):
    """`a ** n` for a number n: `n a^(n-1)`."""

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def compute(self, a: Array) -> Array:
        return a**self.exponent

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        (a,) = node.inputs
        return (out_grad * a ** (self.exponent - 1) * self.exponent,)


class Exp(Op):
    """`e^a` is its own derivative, and the output has it already."""

    def compute(self, a: Array) -> Array:
        return a.exp()

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (out_grad * node,)


class Log(Op):
    """The natural logarithm: `1 / a`."""

    def compute(self, a: Array) -> Array:
        return a.log()

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (out_grad / node.inputs[0],)


class ReLU(Op):
    """`max(a, 0)`: the gradient passes where the output is positive; at 0 the derivative is taken as 0."""

    def compute(self, a: Array) -> Array:
        return a.clamp(min=0)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (out_grad * Tensor((node.array > 0).to(node.array.dtype)),)


class MatMul(Op):
    """`a @ b` of shapes (..., m, k) and (..., k, n): the gradients are `g @ b.T` and `a.T @ g`."""

    def compute(self, a: Array, b: Array) -> Array:
        if a.ndim < 2 or b.ndim < 2:
            raise ValueError(f"a matrix product of shapes {tuple(a.shape)} and {tuple(b.shape)}: both need two axes")
        return a @ b

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor | None, ...]:
        a, b = node.inputs
        return (
            sum_to(out_grad @ b.T, a.shape) if a.needs_grad else None,
            sum_to(a.T @ out_grad, b.shape) if b.needs_grad else None,
        )


class Transpose(Op):
    """The last two axes exchanged: so are the gradient's."""

    def compute(self, a: Array) -> Array:
        return a.transpose(-1, -2)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (out_grad.T,)


class Reshape(Op):
    """Another shape: the gradient gets the old one back."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def compute(self, a: Array) -> Array:
        return a.reshape(self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (out_grad.reshape(*node.inputs[0].shape),)


class BroadcastTo(Op):
    """Elements repeated along new axes and along axes of length 1: the gradient is the sum over the copies."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def compute(self, a: Array) -> Array:
        return a.expand(self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (sum_to(out_grad, node.inputs[0].shape),)


class SumTo(Op):
    """The sum over axes that `shape` lacks in front or has at length 1: the gradient is copied to every summand."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def compute(self, a: Array) -> Array:
        return a.sum_to_size(self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (broadcast_to(out_grad, node.inputs[0].shape),)


def sum_to(a: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`a` summed down to `shape`, from which it could have been broadcast."""
    return a if a.shape == shape else SumTo(shape)(a)


def broadcast_to(a: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`a` repeated up to `shape`."""
    return a if a.shape == shape else BroadcastTo(shape)(a)


def broadcast(a: Tensor, b: Tensor | float) -> tuple[Tensor, Tensor]:
    """Both in the shape that they have in common, so that no other operation needs to know of broadcasting."""
    if not isinstance(b, Tensor):
        b = Tensor(torch.full_like(a.array, b))
    shape = tuple(torch.broadcast_shapes(a.shape, b.shape))
    return broadcast_to(a, shape), broadcast_to(b, shape)
