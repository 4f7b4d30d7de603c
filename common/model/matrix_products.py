"""Matrix products outside autograd, which on a CPU use the faster of the two libraries that torch contains."""

from __future__ import annotations

import torch
from torch import Tensor


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
