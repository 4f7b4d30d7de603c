"""Matrix products outside autograd, on a CPU by the faster of the two libraries that torch brings."""

from __future__ import annotations

import torch
from torch import Tensor


def by_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN multiplies the two: fp32 on a CPU, where torch.mm always asks MKL (bf16 goes to oneDNN by itself)."""
    plain = all(type(t) is Tensor and t.device.type == "cpu" and t.dtype == torch.float32 and t.numel() for t in (a, b))
    return plain and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (m, k) times b (k, n), neither with a gradient.

    On an AMD EPYC MKL took 1.1 to 1.5 times as long (docs/measurements/bench_model.md). The operator is the one
    that torch.compile puts in place of a Linear; it has no derivative, and wants `a` contiguous. A process that handles signals
    must give them a stack of their own while oneDNN multiplies, as `common/process/begin.py` does.
    """
    if by_onednn(a, b):
        found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
        return found
    return a @ b
