"""Reverse-mode differentiation: the walk back through the graph, from a loss to all tensors that need a gradient."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from gptscale.ops.minigrad.tensor import Op, Tensor, recording


class OpStopwatch(Protocol):
    """An object that measures how long each operation's gradient takes."""

    def lap(self, op: Op) -> AbstractContextManager[None]:
        """Return a context that is entered just before the gradient of `op` is computed and left just after."""
        ...


def backward(loss: Tensor, *, record: bool = False, stopwatch: OpStopwatch | None = None) -> None:
    """Add the derivative of `loss`, a single number, to `grad` of every leaf that needs a gradient.

    record: remember how the gradients were computed, so that they can be differentiated too.

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
            with stopwatch.lap(node.op) if stopwatch else nullcontext():
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
