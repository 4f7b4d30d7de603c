"""The walk back through the graph, from a loss to everything that needs its gradient: reverse-mode differentiation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from gptscale.ops.minigrad.tensor import Op, Tensor, recording


class Stopwatch(Protocol):
    """Whoever wants to know how long each operation's gradient took."""

    def lap(self, op: Op) -> AbstractContextManager[None]:
        """Entered just before the gradient of `op` is computed, left just after."""
        ...


def backward(loss: Tensor, *, record: bool = False, stopwatch: Stopwatch | None = None) -> None:
    """Add to `grad` of every leaf that needs one the derivative of `loss` (a single number) by that leaf.

    record: remember how the gradients were computed, so that they can be differentiated in their turn.

    By the chain rule the derivative by a tensor is the sum, over the tensors that it went into, of theirs times the local
    derivative. So a tensor's turn comes when all of those have had theirs: in reverse topological order.
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
                    known = gradients.get(id(tensor))
                    gradients[id(tensor)] = gradient if known is None else known + gradient


def topological_order(last: Tensor) -> list[Tensor]:
    """All that need a gradient among the tensors `last` was computed from, each behind its inputs.

    A stack of its own instead of recursion: a graph may be deeper than Python's stack.
    """
    order: list[Tensor] = []
    seen: set[int] = set()
    stack: list[tuple[Tensor, bool]] = [(last, False)]
    while stack:
        node, inputs_done = stack.pop()
        if inputs_done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack += [(tensor, False) for tensor in node.inputs if tensor.needs_grad]
    return order
