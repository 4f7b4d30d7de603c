"""Cross entropy of a linear head, a block of rows at a time, so that the logits of a whole batch never exist.

At (batch 8, seq 1024, vocabulary 50304) the fp32 logits alone take 1.5 GiB, and autograd's usual path holds several copies.
Here a block's gradient is taken in the forward pass, in the memory of its logits, as in Liger Kernel (Hsu et al.
2024, arXiv 2410.10989): three matrix products per block, the same as the plain head, and no recomputation. On CUDA a kernel of
our own does it in the logits' own 16 bits (ops/cross_entropy_triton.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from gptscale.common.model.matrix_products import product

IGNORE = -100  # a target that counts nothing, as in torch.nn.functional.cross_entropy
# Bytes of one block of logits, copies included; the CPU's is measured (docs/measurements/bench_model.md).
LOGITS_BYTES = {"cpu": 2**28, "cuda": 2**30}
SLICE_BYTES = 2**23  # CPU: of these, taken through the softmax at once, so that its passes find them in the cache
TRITON = importlib.util.find_spec("triton") is not None


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
    """From logits (rows, padded_vocab), which may be overwritten: d loss / d logits of that shape, and the summed loss (fp32).

    The gradient is in the logits' type where a kernel takes it in place, else in fp32.
    """
    if in_own_type(logits.device.type):
        from gptscale.ops.cross_entropy_triton import cross_entropy_

        return logits, cross_entropy_(logits, targets, vocab_size, IGNORE)
    return softmax_and_loss_in_fp32(logits.float(), targets, vocab_size)


def in_own_type(device_type: str) -> bool:
    """Whether `softmax_and_loss` makes no copy of logits there."""
    return device_type == "cuda" and TRITON


def softmax_and_loss_in_fp32(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """As `softmax_and_loss`, from fp32 logits, overwritten, by torch's own operations."""
    logits[:, vocab_size:] = -torch.inf
    rows = SLICE_BYTES // (4 * logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    slices = zip(logits.split(max(1, rows)), targets.split(max(1, rows)), strict=True)
    return logits, torch.stack([_in_place(*some) for some in slices]).sum()


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


def rows_at_once(rows: int, table_rows: int, logit_bytes: int, device_type: str) -> int:
    """How many of `rows` make a block: as equal blocks as LOGITS_BYTES allows, since a short one multiplies slowly.

    logit_bytes: what is alive for each logit.
    """
    most = max(1, LOGITS_BYTES[device_type] // (logit_bytes * table_rows))
    return max(1, -(-rows // max(1, -(-rows // most))))


def bytes_of_a_logit(dtype: torch.dtype, softmax: SoftmaxAndLoss, device_type: str) -> int:
    """What is alive for each logit: itself, and, where it has 16 bits and `softmax` does not take it so, a copy in fp32."""
    if device_type == "cpu":
        return 4  # as measured in fp32
    if dtype == torch.float32 or (softmax is softmax_and_loss and in_own_type(device_type)):
        return dtype.itemsize
    return dtype.itemsize + 4


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
    logit_bytes = bytes_of_a_logit(dtype, softmax, x.device.type)
    rows = rows_at_once(x.shape[0], weight.shape[0], logit_bytes, x.device.type)
    x_cast, weight_cast = x.to(dtype), weight.to(dtype)
    grad_x = torch.empty_like(x) if wanted else None
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if wanted else None
    total = x.new_zeros((), dtype=torch.float32)
    for begin in range(0, x.shape[0], rows):
        part = slice(begin, begin + rows)
        grad, loss = softmax(product(x_cast[part], weight_cast.t()), targets[part], vocab_size)
        total += loss
        if grad_x is not None and grad_weight is not None:
            grad = grad.to(dtype)
            grad_x[part] = product(grad, weight_cast)
            _add_product(grad_weight, grad.t(), x_cast[part], first=begin == 0)
        del grad  # or the next block's logits would be made beside it
    return total, grad_x, grad_weight.to(weight.dtype) if grad_weight is not None else None


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total += a b, total being fp32; `first`: = instead."""
    beta = 0.0 if first else 1.0
    if a.dtype == torch.float32:
        total.addmm_(a, b, beta=beta)
    elif a.device.type == "cuda" and TorchVersion(torch.__version__) >= "2.11":  # before, `total` could not be fp32
        torch.addmm(total, a, b, out_dtype=torch.float32, beta=beta, out=total)  # type: ignore[call-overload]
    elif first:
        total.copy_(a @ b)
    else:  # each block's product in the compute dtype, their sum in fp32
        total += a @ b


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
