"""The output head and its cross entropy, computed for a block of rows at a time.

The logits of a whole batch never exist. At batch 8, seq 1024 and vocabulary 50304 they would take 1.5 GiB in fp32, and autograd
would hold several copies. Here the gradient of a block is computed in the forward pass and overwrites its logits, as in Liger
Kernel (Hsu et al. 2024, arXiv 2410.10989). That takes three matrix products per block, as the plain head does, and no
recomputation. On CUDA the kernel in ops/cross_entropy_triton.py works on the logits in their own 16 bits.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

# A target that is not counted, as in torch.nn.functional.cross_entropy.
IGNORE = -100
# Bytes of one block of logits, copies included; the CPU's is measured (docs/measurements/bench_model.md).
LOGITS_BYTES = {"cpu": 2**28, "cuda": 2**30}
# On a CPU, bytes of logits that go through the softmax together, so that its passes over them find them in the cache.
SLICE_BYTES = 2**23
TRITON = importlib.util.find_spec("triton") is not None


class LinearCrossEntropy(nn.Module):
    """The loss of the output head as a module, which a strategy that cuts the token table replaces with its own.

    It has no parameters. The weight of the head is an argument.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss, an fp32 scalar.

        x: (batch, seq, n_embd). weight: (padded_vocab, n_embd). targets: (batch, seq).
        """
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), self.vocab_size)


SoftmaxAndLoss = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softmax: SoftmaxAndLoss | None = None
) -> Tensor:
    """Return the summed cross entropy (fp32 scalar) of the logits x @ weight.T against targets.

    x: (rows, n_embd). weight: (padded_vocab, n_embd); rows from `vocab_size` on are padding and have probability 0. targets:
    (rows,) int64, where -100 is not counted. softmax: `softmax_and_loss`, or a function with the same arguments that knows the
    other parts of a table that is cut.

    Products run in the dtype of autocast if it is on, else in that of x. Softmax and sums run in fp32. The result can be
    differentiated once, with respect to x and weight.
    """
    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
    softmax = softmax or softmax_and_loss
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return _loss_and_gradients(x, weight, targets, vocab_size, softmax, dtype, with_gradients=False)[0]
    total, grad_x, grad_weight = _loss_and_gradients(
        x.detach(), weight.detach(), targets, vocab_size, softmax, dtype, with_gradients=True
    )
    # Two nodes and a sum of torch's own, instead of one node with two inputs. Pipeline schedules that split a backward in two
    # (zero bubble) can only cut the graph at nodes of torch's own.
    of_x: Tensor = _WithGradient.apply(x, grad_x, total)  # type: ignore[no-untyped-call]
    of_weight: Tensor = _WithGradient.apply(weight, grad_weight, torch.zeros_like(total))  # type: ignore[no-untyped-call]
    return of_x + of_weight


def softmax_and_loss(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return d loss / d logits (rows, padded_vocab) and the summed loss (fp32 scalar) of logits of the same shape.

    The logits may be overwritten. Where a kernel computes the gradient in place it has the type of the logits, else it is fp32.
    """
    if in_own_type(logits.device.type):
        from gptscale.ops.cross_entropy_triton import cross_entropy_

        return logits, cross_entropy_(logits, targets, vocab_size, IGNORE)
    return softmax_and_loss_in_fp32(logits.float(), targets, vocab_size)


def in_own_type(device_type: str) -> bool:
    """Return whether `softmax_and_loss` needs no fp32 copy of the logits on such a device."""
    return device_type == "cuda" and TRITON


def softmax_and_loss_in_fp32(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Do what `softmax_and_loss` does with torch's own operations, on fp32 logits that are overwritten."""
    logits[:, vocab_size:] = -torch.inf
    rows = SLICE_BYTES // (4 * logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    slices = zip(logits.split(max(1, rows)), targets.split(max(1, rows)), strict=True)
    return logits, torch.stack([_softmax_in_place(*rows_and_targets) for rows_and_targets in slices]).sum()


def _softmax_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Overwrite the logits of a few rows with their gradient and return the summed loss of these rows."""
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
    """Return the number of rows in a block, so that LOGITS_BYTES suffices and all blocks are about equally long.

    A short last block would multiply slowly. logit_bytes: bytes in memory for each logit (`bytes_of_a_logit`).
    """
    most = max(1, LOGITS_BYTES[device_type] // (logit_bytes * table_rows))
    blocks = max(1, math.ceil(rows / most))
    return max(1, math.ceil(rows / blocks))


def bytes_of_a_logit(dtype: torch.dtype, softmax: SoftmaxAndLoss, device_type: str) -> int:
    """Return the bytes in memory for each logit: its own, and those of an fp32 copy if `softmax` makes one."""
    if device_type == "cpu":
        # LOGITS_BYTES was measured in fp32.
        return 4
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
    with_gradients: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the summed loss and, if asked for, its gradients with respect to x and weight, else None for both."""
    logit_bytes = bytes_of_a_logit(dtype, softmax, x.device.type)
    rows = rows_at_once(x.shape[0], weight.shape[0], logit_bytes, x.device.type)
    x_cast, weight_cast = x.to(dtype), weight.to(dtype)
    grad_x = torch.empty_like(x) if with_gradients else None
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if with_gradients else None
    total = x.new_zeros((), dtype=torch.float32)
    for begin in range(0, x.shape[0], rows):
        block = slice(begin, begin + rows)
        grad, loss = softmax(product(x_cast[block], weight_cast.t()), targets[block], vocab_size)
        total += loss
        if grad_x is not None and grad_weight is not None:
            grad = grad.to(dtype)
            grad_x[block] = product(grad, weight_cast)
            _add_product(grad_weight, grad.t(), x_cast[block], first=begin == 0)
        # Free it now, or the logits of the next block would be allocated beside it.
        del grad
    return total, grad_x, grad_weight.to(weight.dtype) if grad_weight is not None else None


def by_onednn(a: Tensor, b: Tensor) -> bool:
    """Return whether `product` uses oneDNN for these two.

    It does for fp32 on a CPU, where torch.mm always uses MKL. For bf16 torch.mm uses oneDNN by itself.
    """
    plain = all(type(t) is Tensor and t.device.type == "cpu" and t.dtype == torch.float32 and t.numel() for t in (a, b))
    return plain and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a (m, k) times b (k, n), neither of which has a gradient.

    On an AMD EPYC, MKL took 1.1 to 1.5 times as long as oneDNN (docs/measurements/bench_model.md). The operator used here is the
    one that torch.compile puts in place of a Linear. It has no derivative, and `a` must be contiguous. A process that handles
    signals must give their handlers a stack of their own while oneDNN multiplies, as common/process/begin.py does.
    """
    if by_onednn(a, b):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
        return y
    return a @ b


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add a b to `total`, which is fp32, or overwrite `total` with it if `first`."""
    beta = 0.0 if first else 1.0
    if a.dtype == torch.float32:
        total.addmm_(a, b, beta=beta)
    elif a.device.type == "cuda" and TorchVersion(torch.__version__) >= "2.11":
        # Older versions of torch cannot add products of 16-bit numbers to an fp32 matrix.
        torch.addmm(total, a, b, out_dtype=torch.float32, beta=beta, out=total)  # type: ignore[call-overload]
    elif first:
        total.copy_(a @ b)
    else:
        # The product of each block is rounded to the compute dtype, the sum over blocks is fp32.
        total += a @ b


class _WithGradient(torch.autograd.Function):
    """A copy of the scalar `value` whose gradient with respect to `tensor` is `grad`, computed before."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, grad: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,) = ctx.saved_tensors
        return grad * grad_value.to(grad.dtype), None, None
