"""Cross entropy of a linear head, a block of rows at a time, so that the logits of a whole batch never exist.

At (batch 8, seq 1024, vocabulary 50304) the fp32 logits alone take 1.5 GiB, and autograd's usual path holds several copies.
Here a block's gradient is taken while its logits are still in cache, in the forward pass, as in Liger Kernel (Hsu et al.
2024, arXiv 2410.10989): three matrix products per block, the same as the plain head, and no recomputation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a target that counts nothing, as in torch.nn.functional.cross_entropy
LOGITS_BYTES = {"cpu": 2**27, "cuda": 2**30}  # fp32 logits alive at once; CPU: measured, see docs/LOG.md


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Summed cross entropy (fp32 scalar) of the logits x @ weight.T against targets.

    x (rows, n_embd); weight (padded_vocab, n_embd), of which only the first `vocab_size` rows can win; targets (rows,)
    int64, -100 to ignore. Products run in autocast's dtype if it is on, else in x's; softmax and sums in fp32.
    Differentiable once, in x and weight.
    """
    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, targets, vocab_size, dtype)  # type: ignore[no-untyped-call]
    return loss


def softmax_and_loss(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """From fp32 logits (rows, padded_vocab), overwritten: d loss / d logits (rows, padded_vocab), and the summed loss."""
    logits[:, vocab_size:] = -torch.inf
    counted = (targets != IGNORE).unsqueeze(1)
    column = targets.clamp_min(0).unsqueeze(1)
    log_probs = F.log_softmax(logits, dim=1)
    loss = -(log_probs.gather(1, column) * counted).sum()
    grad = log_probs.exp_().scatter_add_(1, column, log_probs.new_full((1, 1), -1.0).expand_as(column))
    return grad.mul_(counted), loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
        wants_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        rows = max(1, LOGITS_BYTES[x.device.type] // (4 * weight.shape[0]))
        x_cast, weight_cast = x.to(dtype), weight.to(dtype)
        grad_x = torch.empty_like(x) if wants_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_grad else None
        total = x.new_zeros((), dtype=torch.float32)
        for begin in range(0, x.shape[0], rows):
            part = slice(begin, begin + rows)
            logits = (x_cast[part] @ weight_cast.t()).float()
            grad, loss = softmax_and_loss(logits, targets[part], vocab_size)
            total += loss
            if grad_x is not None and grad_weight is not None:
                grad = grad.to(dtype)
                grad_x[part] = grad @ weight_cast
                if dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), x_cast[part])
                else:  # each block's product in the compute dtype, their sum in fp32
                    grad_weight += grad.t() @ x_cast[part]
        ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype) if grad_weight is not None else None)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_total.to(grad_x.dtype), grad_weight * grad_total.to(grad_weight.dtype), None, None, None
