"""What no step can beat: the matrix products of a GPT at their exact shapes, alone, and the bandwidth of copying.

The six floors of `floors` are what docs/measurements/bench_model.md calls the roofline: products at the rates measured
here, everything else at the bytes it cannot avoid moving, over the bandwidth measured here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from gptscale.common.measure.speed import synchronize
from gptscale.common.model.matrix_products import by_onednn, product
from gptscale.common.settings.gpt_config import GPTConfig

K = TypeVar("K", bound=Hashable)

COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}  # far beyond the caches
REPEATS = 7
ROUND_S = 0.02  # of one timing at least, so that the clock's grain and a launch do not show
PARTS = ("matrix products", "attention", "elementwise", "loss", "optimizer", "gaps")


class Product(NamedTuple):
    """One matrix product of a step: (m, k) times (k, n), `per_step` times in a step; how: as torch's Linear lays it out."""

    name: str
    how: str
    m: int
    k: int
    n: int
    per_step: int

    @property
    def flops(self) -> float:
        """Of one of them."""
        return 2.0 * self.m * self.k * self.n


def products(gpt: GPTConfig, rows: int) -> Iterator[Product]:
    """Those of a step over `rows` tokens: three for each matrix. The head has the table's rows in memory, padding included."""
    h = gpt.n_embd
    matrices = [("qkv", h, 3 * h), ("proj", h, h), ("fc", h, 4 * h), ("fc-out", 4 * h, h)]
    for name, k, n in [*matrices, ("head", h, gpt.padded_vocab_size)]:
        per_step = 1 if name == "head" else gpt.n_layer
        yield Product(name, "forward", rows, k, n, per_step)
        yield Product(name, "grad-input", rows, n, k, per_step)
        yield Product(name, "grad-weight", n, rows, k, per_step)


def routes(which: Product, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    """Calls that compute it, on normally distributed operands (zeros would draw less power) laid out as Linear has them.

    mm is torch.mm; onednn, where common/model/matrix_products.py would take it, is the other library on a CPU, which computes the
    transposed gradient of a weight, the better one for it.
    """

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    m, k, n = which.m, which.k, which.n
    left = normal(k, m).t() if which.how == "grad-weight" else normal(m, k)
    right = normal(n, k).t() if which.how == "forward" else normal(k, n)
    out = torch.empty(m, n, dtype=dtype, device=device)
    found: dict[str, Callable[[], object]] = {"mm": lambda: torch.mm(left, right, out=out)}
    if by_onednn(left, right):
        a, b = (right.t(), left.t()) if which.how == "grad-weight" else (left, right)
        found["onednn"] = lambda: product(a, b)
    return found


def medians(calls: Mapping[K, Callable[[], object]], device: torch.device) -> dict[K, float]:
    """Median seconds of one call of each; all of them in turn, again and again, so that a disturbance hits one sample of each."""

    def timed(call: Callable[[], object], count: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(device)
        return (time.perf_counter() - began) / count

    counts = {}
    for name, call in calls.items():
        timed(call, 1)
        counts[name] = max(1, int(ROUND_S / max(timed(call, 1), 1e-7)))
    rounds = [{name: timed(call, counts[name]) for name, call in calls.items()} for _ in range(REPEATS)]
    return {name: statistics.median(r[name] for r in rounds) for name in calls}


def measure(gpt: GPTConfig, rows: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Seconds of each product by each route, and bytes per second of STREAM's copy (read plus write; McCalpin 1995)."""
    calls = {(p.name, p.how, r): f for p in products(gpt, rows) for r, f in routes(p, dtype, device).items()}
    source = torch.empty(COPY_BYTES[device.type] // 4, device=device).fill_(1.0)
    target = torch.empty_like(source)
    found = medians({**calls, ("copy", "", ""): lambda: target.copy_(source)}, device)
    copy_s = found.pop(("copy", "", ""))
    by_name: dict[str, dict[str, float]] = {}
    for (name, how, route), call_s in found.items():
        by_name.setdefault(f"{name} {how}", {})[route] = call_s
    return {"copy_bytes_per_s": 2 * source.nbytes / copy_s, "products": by_name}


def step_seconds(gpt: GPTConfig, rows: int, found: dict[str, dict[str, float]], route: str | None = None) -> float:
    """Seconds of all products of one step, each by `route`, or by whichever was faster."""
    times = ((p.per_step, found[f"{p.name} {p.how}"]) for p in products(gpt, rows))
    return sum(count * (by_route[route] if route else min(by_route.values())) for count, by_route in times)


def step_flops(gpt: GPTConfig, rows: int) -> float:
    """Operations of all products of one step."""
    return sum(p.per_step * p.flops for p in products(gpt, rows))


def elementwise_bytes_per_token(gpt: GPTConfig, itemsize: int) -> float:
    """What must move between products if each operator is one pass: every input read once, every output written once.

    Per layer and token, in units of h elements: forward, twice a residual sum with the LayerNorm behind it (2 read, 2 written)
    and the GELU (4 and 4); backward, twice the LayerNorm with the residual's gradient (3 and 1) and the GELU (8 and 4). Biases
    and their gradients belong to products. Around the layers: the embedding, written once and its gradient read once, and the
    last LayerNorm (1 and 1, then 2 and 1).
    """
    per_layer = 2 * 4 + 8 + 2 * 4 + 12
    return float((gpt.n_layer * per_layer + 2 + 5) * gpt.n_embd * itemsize)


def floors(gpt: GPTConfig, rows: int, found: Mapping[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Seconds per step that each part cannot go below.

    attention: its products, the causal half, at the mean rate of the others. loss: logits read once and their gradient
    written once. optimizer: AdamW reads weight, gradient and two moments and writes all but the gradient, in fp32; the norm
    reads the gradient once more.
    """
    gemm_s, flops = step_seconds(gpt, rows, found["products"]), step_flops(gpt, rows)
    bandwidth = found["copy_bytes_per_s"]
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
