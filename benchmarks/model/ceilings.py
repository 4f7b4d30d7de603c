"""What no training step can beat: a GPT's matrix products at their exact shapes, alone, and the bandwidth of copying.

The six floors of `floors` are what docs/measurements/bench_model.md calls the roofline: products at the rates measured here,
and everything else at the bytes that it cannot avoid moving, over the bandwidth measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.timing import copy_call, medians
from gptscale.common.model.loss import by_onednn, product
from gptscale.common.settings.shape import ModelConfig

PARTS = ("matrix products", "attention", "elementwise", "loss", "optimizer", "gaps")


class MatrixProduct(NamedTuple):
    """One matrix product of a step: (m, k) times (k, n), `per_step` times in a step.

    how: forward, grad-input or grad-weight, which decides how torch's Linear lays out the operands.
    """

    name: str
    how: str
    m: int
    k: int
    n: int
    per_step: int

    @property
    def flops(self) -> float:
        """Return the floating-point operations of one of them."""
        return 2.0 * self.m * self.k * self.n


def products(gpt: ModelConfig, rows: int) -> Iterator[MatrixProduct]:
    """Yield the products of a step over `rows` tokens, three for each matrix.

    The head has as many columns as the token table has rows in memory, padding included.
    """
    h = gpt.n_embd
    matrices = [("qkv", h, 3 * h), ("proj", h, h), ("fc", h, 4 * h), ("fc-out", 4 * h, h)]
    for name, k, n in [*matrices, ("head", h, gpt.padded_vocab_size)]:
        per_step = 1 if name == "head" else gpt.n_layer
        yield MatrixProduct(name, "forward", rows, k, n, per_step)
        yield MatrixProduct(name, "grad-input", rows, n, k, per_step)
        yield MatrixProduct(name, "grad-weight", n, rows, k, per_step)


def routes(matrix_product: MatrixProduct, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the calls that compute a product, by the name of the library route.

    mm is torch.mm. onednn, where common/model/loss.py would take it, is the other library on a CPU. For the gradient
    of a weight it computes the transpose, which suits it better. Operands are laid out as Linear has them and normally
    distributed, because zeros would draw less power.
    """

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    m, k, n = matrix_product.m, matrix_product.k, matrix_product.n
    left = normal(k, m).t() if matrix_product.how == "grad-weight" else normal(m, k)
    right = normal(n, k).t() if matrix_product.how == "forward" else normal(k, n)
    out = torch.empty(m, n, dtype=dtype, device=device)
    calls: dict[str, Callable[[], object]] = {"mm": lambda: torch.mm(left, right, out=out)}
    if by_onednn(left, right):
        a, b = (right.t(), left.t()) if matrix_product.how == "grad-weight" else (left, right)
        calls["onednn"] = lambda: product(a, b)
    return calls


def measure(gpt: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Measure the seconds of each product by each route, and the bytes per second of a copy, read plus write."""
    calls = {(p.name, p.how, r): call for p in products(gpt, rows) for r, call in routes(p, dtype, device).items()}
    copy, copy_bytes = copy_call(device)
    seconds = medians({**calls, ("copy", "", ""): copy}, device)
    copy_s = seconds.pop(("copy", "", ""))
    by_name: dict[str, dict[str, float]] = {}
    for (name, how, route), call_s in seconds.items():
        by_name.setdefault(f"{name} {how}", {})[route] = call_s
    return {"copy_bytes_per_s": copy_bytes / copy_s, "products": by_name}


def step_seconds(
    gpt: ModelConfig, rows: int, product_s: Mapping[str, Mapping[str, float]], route: str | None = None
) -> float:
    """Return the seconds of all products of one step, each by `route`, or by whichever route was faster.

    product_s: seconds of each product by each route, as `measure` returns them.
    """
    total_s = 0.0
    for p in products(gpt, rows):
        by_route = product_s[f"{p.name} {p.how}"]
        total_s += p.per_step * (by_route[route] if route else min(by_route.values()))
    return total_s


def step_flops(gpt: ModelConfig, rows: int) -> float:
    """Return the floating-point operations of all products of one step."""
    return sum(p.per_step * p.flops for p in products(gpt, rows))


def elementwise_bytes_per_token(gpt: ModelConfig, itemsize: int) -> float:
    """Return the bytes that must move between products if each operator reads every input and writes every output once.

    Per layer and token, in units of h elements. Forward: twice a residual sum with the LayerNorm behind it (2 read, 2 written),
    and the GELU (4 and 4). Backward: twice the LayerNorm with the residual's gradient (3 and 1), and the GELU (8 and 4). Biases
    and their gradients belong to products. Around the layers: the embedding is written once and its gradient read once, and the
    last LayerNorm moves 1 and 1, then 2 and 1.
    """
    per_layer = 2 * 4 + 8 + 2 * 4 + 12
    return float((gpt.n_layer * per_layer + 2 + 5) * gpt.n_embd * itemsize)


def floors(gpt: ModelConfig, rows: int, ceilings: Mapping[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Return the seconds per step that each part cannot go below, at the rates in `ceilings` (of `measure`).

    attention: its products, the causal half, at the mean rate of the others. loss: logits read once and their gradient
    written once. optimizer: AdamW reads weight, gradient and two moments and writes all but the gradient, in fp32. The norm
    reads the gradient once more.
    """
    gemm_s, flops = step_seconds(gpt, rows, ceilings["products"]), step_flops(gpt, rows)
    bandwidth = ceilings["copy_bytes_per_s"]
    attention = 6.0 * gpt.n_layer * gpt.n_embd * gpt.block_size * rows
    least = {
        "matrix products": gemm_s,
        "attention": attention / (flops / gemm_s),
        "elementwise": rows * elementwise_bytes_per_token(gpt, dtype.itemsize) / bandwidth,
        "loss": 2.0 * rows * gpt.padded_vocab_size * dtype.itemsize / bandwidth,
        "optimizer": 32.0 * gpt.n_params_in_memory / bandwidth,
        "gaps": 0.0,
    }
    return {part: least[part] for part in PARTS}
