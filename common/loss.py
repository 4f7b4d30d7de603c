"""Cross entropy of a linear head, a block of rows at a time, so that the logits of a whole batch never exist.

At (batch 8, seq 1024, vocabulary 50304) the fp32 logits alone take 1.5 GiB, and autograd's usual path holds several copies.
Here a block's gradient is taken in the forward pass, in the memory of its logits, as in Liger Kernel (Hsu et al.
2024, arXiv 2410.10989): three matrix products per block, the same as the plain head, and no recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptscale.common.products import product

IGNORE = -100  # a target that counts nothing, as in torch.nn.functional.cross_entropy
LOGITS_BYTES = {"cpu": 2**28, "cuda": 2**30}  # fp32 logits alive at once; CPU: measured, see docs/bench_model.md
SLICE_BYTES = 2**23  # CPU: of these, taken through the softmax at once, so that its passes find them in the cache


class LinearCrossEntropy(nn.Module):
    """The head and its loss, as a module without parameters, so that a strategy which cuts the table can put its own here."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Summed loss, fp32 scalar. x (batch, seq, n_embd); weight (padded_vocab, n_embd); targets (batch, seq)."""
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), self.vocab_size)


SoftmaxAndLoss = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softmax: SoftmaxAndLoss | None = None
) -> Tensor:
    """Summed cross entropy (fp32 scalar) of the logits x @ weight.T against targets.

    x (rows, n_embd); weight (padded_vocab, n_embd), of which only the first `vocab_size` rows can win; targets (rows,)
    int64, -100 to ignore. Products run in autocast's dtype if it is on, else in x's; softmax and sums in fp32.
    Differentiable once, in x and weight. softmax: `softmax_and_loss`, or one that knows the rest of a table that is cut.
    """
    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
    softmax = softmax or softmax_and_loss
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return _loss_and_gradients(x, weight, targets, vocab_size, softmax, dtype, wanted=False)[0]
    total, grad_x, grad_weight = _loss_and_gradients(
        x.detach(), weight.detach(), targets, vocab_size, softmax, dtype, wanted=True
    )
    # Two nodes and a sum, not one node with two inputs: schedules that take a backward apart (zero bubble) can only cut the
    # graph at nodes of torch's own.
    of_x: Tensor = _WithGradient.apply(x, grad_x, total)  # type: ignore[no-untyped-call]
    of_weight: Tensor = _WithGradient.apply(weight, grad_weight, torch.zeros_like(total))  # type: ignore[no-untyped-call]
    return of_x + of_weight


def softmax_and_loss(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """From fp32 logits (rows, padded_vocab), overwritten: d loss / d logits (rows, padded_vocab), and the summed loss."""
    logits[:, vocab_size:] = -torch.inf
    if logits.device.type == "cpu":
        rows = max(1, SLICE_BYTES // (4 * logits.shape[1]))
        slices = zip(logits.split(rows), targets.split(rows), strict=True)
        return logits, torch.stack([_in_place(*some) for some in slices]).sum()
    counted = (targets != IGNORE).unsqueeze(1)
    column = targets.clamp_min(0).unsqueeze(1)
    log_probs = F.log_softmax(logits, dim=1)
    loss = -(log_probs.gather(1, column) * counted).sum()
    grad = log_probs.exp_().scatter_add_(1, column, log_probs.new_full((1, 1), -1.0).expand_as(column))
    return grad.mul_(counted), loss


def _in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of a few rows, whose logits become their gradient."""
    counted = (targets != IGNORE).unsqueeze(1)
    column = targets.clamp_min(0).unsqueeze(1)
    largest = logits.amax(1, keepdim=True)
    below = largest - logits.gather(1, column)
    probs = logits.sub_(largest).exp_()
    sums = probs.sum(1, keepdim=True)
    loss = ((sums.log() + below) * counted).sum()
    probs.mul_(counted / sums).scatter_add_(1, column, -counted.to(probs.dtype))
    return loss


def rows_at_once(rows: int, table_rows: int, device_type: str) -> int:
    """How many of `rows` make a block: as equal blocks as LOGITS_BYTES allows, since a short one multiplies slowly."""
    most = max(1, LOGITS_BYTES[device_type] // (4 * table_rows))
    return max(1, -(-rows // max(1, -(-rows // most))))


def _loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softmax: SoftmaxAndLoss,
    dtype: torch.dtype,
    *,
    wanted: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The summed loss and, if `wanted`, its gradients in x and weight, block of rows by block of rows."""
    rows = rows_at_once(x.shape[0], weight.shape[0], x.device.type)
    x_cast, weight_cast = x.to(dtype), weight.to(dtype)
    grad_x = torch.empty_like(x) if wanted else None
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if wanted else None
    total = x.new_zeros((), dtype=torch.float32)
    for begin in range(0, x.shape[0], rows):
        part = slice(begin, begin + rows)
        logits = product(x_cast[part], weight_cast.t()).float()
        grad, loss = softmax(logits, targets[part], vocab_size)
        total += loss
        if grad_x is not None and grad_weight is not None:
            grad = grad.to(dtype)
            grad_x[part] = product(grad, weight_cast)
            if dtype == torch.float32:
                grad_weight.addmm_(grad.t(), x_cast[part], beta=float(begin > 0))
            elif begin == 0:
                grad_weight.copy_(grad.t() @ x_cast[part])
            else:  # each block's product in the compute dtype, their sum in fp32
                grad_weight += grad.t() @ x_cast[part]
    return total, grad_x, grad_weight.to(weight.dtype) if grad_weight is not None else None


class _WithGradient(torch.autograd.Function):
    """`value`, a scalar whose gradient in `tensor` is known."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, grad: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,) = ctx.saved_tensors
        return grad * grad_value.to(grad.dtype), None, None
