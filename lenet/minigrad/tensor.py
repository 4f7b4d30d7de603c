"""A tensor that remembers the operation it came from, arithmetic for such tensors, and the walk back from a loss.

The numbers are in a `torch.Tensor` that serves as a plain array. Nothing of torch's own autograd is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

Array = torch.Tensor
_recording = True


@contextmanager
def recording(on: bool) -> Iterator[None]:
    """Switch on or off, for a while, that new tensors remember the operation they came from."""
    global _recording
    before, _recording = _recording, on
    try:
        yield
    finally:
        _recording = before


class Op:
    """One call of an operation: how its value is computed, and how a gradient goes back through it.

    An object is used for a single call, so `compute` may store on `self` what `gradient` needs.
    """

    compute: Callable[..., Array]
    """Compute the array of the output from the arrays of the inputs."""

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor | None, ...]:
        """Return the derivative of the loss by each of `node.inputs`, given `out_grad`, its derivative by `node`.

        `node` is the output of this operation. The derivatives are computed with tensors and not with arrays, so that they
        can be recorded for a second derivative. None stands for a derivative that is not needed.
        """
        raise NotImplementedError

    def refuse_to_be_recorded(self) -> None:
        """Raise NotImplementedError while recording, because a second derivative would silently lack this operation."""
        if _recording:
            why = "its gradient is a kernel's, use conv2d and relu"
            raise NotImplementedError(f"{type(self).__name__} has no second derivative: {why}")

    def __call__(self, *inputs: Tensor) -> Tensor:
        array = self.compute(*(tensor.array for tensor in inputs))
        if _recording and any(tensor.needs_grad for tensor in inputs):
            return Tensor(array, needs_grad=True, op=self, inputs=inputs)
        return Tensor(array)


class Tensor:
    """A node of the graph: an array, and the operation and inputs that it was computed from.

    Operation and inputs are kept only if one of the inputs needs a gradient.
    """

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
        """Exchange the last two axes."""
        return Transpose()(self)

    def reshape(self, *shape: int) -> Tensor:
        """Return the same numbers in another shape, in which one axis may be -1."""
        return Reshape(shape)(self)

    def sum(self, *axes: int, keepdim: bool = False) -> Tensor:
        """Return the sum over the given axes, or over all."""
        summed_axes = {axis % len(self.shape) for axis in axes or range(len(self.shape))}
        result = sum_to(self, tuple(1 if i in summed_axes else size for i, size in enumerate(self.shape)))
        if keepdim:
            return result
        return result.reshape(*(size for i, size in enumerate(self.shape) if i not in summed_axes))

    def mean(self) -> Tensor:
        """Return the mean of all elements."""
        return self.sum() * (1.0 / self.array.numel())

    def exp(self) -> Tensor:
        return Exp()(self)

    def relu(self) -> Tensor:
        return ReLU()(self)


class Add(Op):
    """`a + b`, whose derivatives are both 1."""

    compute = staticmethod(torch.add)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
        return out_grad, out_grad


class Multiply(Op):
    """`a * b`, element by element, where each factor is the derivative by the other."""

    compute = staticmethod(torch.mul)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor | None, ...]:
        a, b = node.inputs
        return out_grad * b if a.needs_grad else None, out_grad * a if b.needs_grad else None


class Power(Op):
    """`a ** n` for a number n, with the derivative `n a^(n-1)`."""

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def compute(self, a: Array) -> Array:
        return a**self.exponent

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (out_grad * node.inputs[0] ** (self.exponent - 1) * self.exponent,)


class Exp(Op):
    """`e^a`, which is its own derivative, so that the gradient uses the output."""

    compute = staticmethod(torch.exp)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (out_grad * node,)


class ReLU(Op):
    """`max(a, 0)`, which passes the gradient where the output is positive. At 0 the derivative is taken as 0."""

    def compute(self, a: Array) -> Array:
        return a.clamp(min=0)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (out_grad * Tensor((node.array > 0).to(node.array.dtype)),)


class MatMul(Op):
    """`a @ b` of shapes (..., m, k) and (..., k, n), with the gradients `g @ b.T` and `a.T @ g`."""

    def compute(self, a: Array, b: Array) -> Array:
        if a.ndim < 2 or b.ndim < 2:
            raise ValueError(f"a matrix product of shapes {tuple(a.shape)} and {tuple(b.shape)}: both need two axes")
        return a @ b

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor | None, ...]:
        a, b = node.inputs
        by_a = sum_to(out_grad @ b.T, a.shape) if a.needs_grad else None
        return by_a, sum_to(a.T @ out_grad, b.shape) if b.needs_grad else None


class Transpose(Op):
    """The last two axes exchanged, as in the gradient."""

    def compute(self, a: Array) -> Array:
        return a.transpose(-1, -2)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (out_grad.T,)


class Reshape(Op):
    """Another shape, where the gradient gets the shape of the input."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def compute(self, a: Array) -> Array:
        return a.reshape(self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (out_grad.reshape(*node.inputs[0].shape),)


class BroadcastTo(Reshape):
    """Elements repeated along new axes and axes of length 1, where the gradient is the sum over the copies."""

    def compute(self, a: Array) -> Array:
        return a.expand(self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (sum_to(out_grad, node.inputs[0].shape),)


class SumTo(Reshape):
    """The sum over axes that `shape` lacks in front or has with length 1. The gradient is copied to every summand."""

    def compute(self, a: Array) -> Array:
        return a.sum_to_size(self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (broadcast_to(out_grad, node.inputs[0].shape),)


def sum_to(a: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum `a` to `shape`, a shape that could be broadcast to that of `a`."""
    return a if a.shape == shape else SumTo(shape)(a)


def broadcast_to(a: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Repeat `a` to `shape`."""
    return a if a.shape == shape else BroadcastTo(shape)(a)


def broadcast(a: Tensor, b: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return both in their common shape, so that no other operation has to handle broadcasting."""
    if not isinstance(b, Tensor):
        b = Tensor(torch.full_like(a.array, b))
    shape = tuple(torch.broadcast_shapes(a.shape, b.shape))
    return broadcast_to(a, shape), broadcast_to(b, shape)


def backward(
    loss: Tensor, *, record: bool = False, around: Callable[[Op], AbstractContextManager[object]] = nullcontext
) -> None:
    """Add the derivative of `loss`, a single number, to `grad` of every leaf that needs a gradient.

    record: remember how the gradients were computed, so that they can be differentiated too. around: gives the context in which
    an operation's gradient is computed.

    By the chain rule, the derivative by a tensor is a sum over the tensors that were computed from it: the derivative by
    each of those, times the local derivative. So a tensor is visited after all of those, in reverse topological order.
    """
    if loss.array.numel() != 1:
        raise ValueError(f"backward starts from a single number, not from shape {loss.shape}: take a sum or a mean")
    if not loss.needs_grad:
        raise ValueError("nothing that the loss was computed from needs a gradient")
    gradients = {id(loss): Tensor(torch.ones_like(loss.array))}
    with recording(record):
        for node in reversed(topological_order(loss)):
            out_grad = gradients.pop(id(node))
            if node.op is None:
                node.grad = out_grad if node.grad is None else node.grad + out_grad
                continue
            with around(node.op):
                in_grads = node.op.gradient(out_grad, node)
            for tensor, gradient in zip(node.inputs, in_grads, strict=True):
                if tensor.needs_grad:
                    assert gradient is not None, f"{type(node.op).__name__} kept back a gradient that is needed"
                    partial_sum = gradients.get(id(tensor))
                    gradients[id(tensor)] = gradient if partial_sum is None else partial_sum + gradient


def topological_order(last: Tensor) -> list[Tensor]:
    """Return the tensors that `last` was computed from and that need a gradient, each one after its inputs.

    The function keeps a stack of its own and does not recurse, because a graph may be deeper than Python's stack.
    """
    order: list[Tensor] = []
    visited: set[int] = set()
    stack: list[tuple[Tensor, bool]] = [(last, False)]
    while stack:
        node, inputs_done = stack.pop()
        if inputs_done:
            order.append(node)
        elif id(node) not in visited:
            visited.add(id(node))
            stack.append((node, True))
            stack += [(tensor, False) for tensor in node.inputs if tensor.needs_grad]
    return order
