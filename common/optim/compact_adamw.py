"""AdamW over fp32 weights whose two moments are stored in bf16, or in 8 bits with a scale per block of 256."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptscale.common.optim.blockwise import BLOCK, Code, dequantise, dynamic_code, quantise
from gptscale.common.settings.run_config import OptimizerState
from gptscale.common.state import local

# Tensors with fewer elements keep fp32 moments. They are norms and biases, which matter much and take little memory.
SMALL = 4096
# Elements handled at once. On a CPU their temporaries should stay in the cache. On a GPU the compiled step has none, and those of
# a checkpoint take 1 GiB or less.
SLICE = {"cpu": 2**16, "cuda": 2**24}


class Rates(NamedTuple):
    """The factors of one step as scalar tensors on the device, so that compiled code is the same for every step.

    decay: 1 - lr x weight decay. keep, new: beta and 1 - beta of the first moment; keep_sq, new_sq: those of the second.
    step_size: lr divided by the bias correction of the first moment. root: the square root of that of the second.
    skip: whether nothing may change.
    """

    decay: Tensor
    keep: Tensor
    new: Tensor
    keep_sq: Tensor
    new_sq: Tensor
    step_size: Tensor
    root: Tensor
    eps: Tensor
    grad_scale: Tensor
    skip: Tensor


class CompactAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) on local shards, with moments stored as `form` says.

    grad_scale, found_inf: as in the fused AdamW of torch. If found_inf is set, weights and state stay as they are, bit for bit.

    The host waits for nothing. The update uses the moments of this step before they are rounded. Small parameters, and the last
    numel % 256 elements of the others, have fp32 moments and are updated by the fused kernel of torch.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], form: OptimizerState
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8})
        first = next(p for group in self.param_groups for p in group["params"])
        self.device = first.device
        self.steps = torch.zeros((), dtype=torch.float32, device=self.device)
        self.codes: dict[str, Code | None] = dict.fromkeys(("exp_avg", "exp_avg_sq"))
        if form == "8bit":
            self.codes = {"exp_avg": dynamic_code(True, self.device), "exp_avg_sq": dynamic_code(False, self.device)}
        # On a CPU compiling takes more seconds than it ever saves.
        self.compiled = self.device.type == "cuda"
        for group in self.param_groups:
            for p in group["params"]:
                self._create_state(p)

    def _create_state(self, p: Tensor) -> None:
        """Create zeroed moments for a parameter, and as its `step` the one tensor that all parameters share."""
        numel = local(p).numel()
        packed = numel - numel % BLOCK if numel >= SMALL else 0
        state = self.state[p]
        state["step"] = self.steps
        for key, code in self.codes.items():
            block = _pack(torch.zeros(1, BLOCK, device=self.device), code)
            names = (key, f"{key}.absmax")[: len(block)]
            state |= {name: tensor.repeat(packed // BLOCK, 1) for name, tensor in zip(names, block, strict=True)}
            state[f"{key}.rest"] = torch.zeros(numel - packed, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every parameter from its gradient, which must exist."""
        self.steps += 1 - self.found_inf
        update: Callable[..., None] = _compiled() if self.compiled else update_slice
        for group in self.param_groups:
            rates = self._rates(group)
            rests: list[tuple[Tensor, ...]] = []
            for p in group["params"]:
                state, packed = self.state[p], self.state[p]["exp_avg"].numel()
                weight, grad = local(p).view(-1), local(p.grad).reshape(-1)
                slices = zip(
                    *(self._split(flat[:packed].view(-1, BLOCK)) for flat in (weight, grad)),
                    *(self._slices(p, key) for key in self.codes),
                    strict=True,
                )
                for weight_grad_and_moments in slices:
                    update(*weight_grad_and_moments, *self.codes.values(), rates)
                if packed < weight.numel():
                    rest = (state[f"{key}.rest"] for key in self.codes)
                    rests.append((weight[packed:], grad[packed:], *rest))
            if rests:
                step_fp32(self, group, zip(*rests, strict=True), [self.steps] * len(rests))

    def _rates(self, group: dict[str, Any]) -> Rates:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        # In fp64, because in fp32 rounding would spoil 1 - beta ** t. `torch.full` brings lr and beta to the device by a kernel,
        # so that the host need not wait for a copy.
        steps = self.steps.double()
        step_size = lr / (1 - beta1**steps)
        root = (1 - beta2**steps).sqrt()
        decay, keep, new, keep_sq, new_sq, eps = (
            torch.full((), value, device=self.device)
            for value in (1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, group["eps"])
        )
        scale, skip = self.grad_scale, self.found_inf > 0
        return Rates(decay, keep, new, keep_sq, new_sq, step_size.float(), root.float(), eps, scale, skip)

    def _split(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Split `blocks`, a block in each row, into slices that differ by at most one row.

        The slices are detached, because compiled code is bound to the shape of the tensor that its argument is a view of. Only
        the number of rows may vary.
        """
        n_slices = math.ceil(blocks.shape[0] * BLOCK / SLICE[self.device.type])
        if n_slices == 0:
            return ()
        slices = tuple(rows.detach() for rows in blocks.tensor_split(n_slices))
        if self.compiled:
            for rows in slices:
                torch._dynamo.mark_dynamic(rows, 0)
        return slices

    def _slices(self, p: Tensor, key: str) -> Iterator[tuple[Tensor, ...]]:
        """Return what is stored of a moment, in slices: bf16 (n, 256), or codes (n, 256) and absmax (n, 1)."""
        names = (key,) if self.codes[key] is None else (key, f"{key}.absmax")
        return zip(*(self._split(self.state[p][name]) for name in names), strict=True)

    @torch.no_grad()
    def moment(self, p: Tensor, key: str) -> Tensor:
        """Return a copy of `exp_avg` or `exp_avg_sq` in fp32, in the shape of the local shard of `p`."""
        moment = torch.empty_like(local(p), dtype=torch.float32)
        flat, packed = moment.view(-1), self.state[p][key].numel()
        for rows, stored in zip(self._split(flat[:packed].view(-1, BLOCK)), self._slices(p, key), strict=True):
            rows.copy_(_unpack(stored, self.codes[key]))
        flat[packed:] = self.state[p][f"{key}.rest"]
        return moment

    @torch.no_grad()
    def set_moment(self, p: Tensor, key: str, moment: Tensor) -> None:
        """Store a moment that is given in fp32.

        The values that `moment()` returned give the same bits as before.
        """
        flat, packed = moment.view(-1), self.state[p][key].numel()
        for rows, stored in zip(self._split(flat[:packed].view(-1, BLOCK)), self._slices(p, key), strict=True):
            for old, new in zip(stored, _pack(rows, self.codes[key]), strict=True):
                old.copy_(new)
        self.state[p][f"{key}.rest"].copy_(flat[packed:])


def step_fp32(optimizer: Any, group: dict[str, Any], tensors: Iterable[Iterable[Tensor]], steps: list[Tensor]) -> None:
    """Update what has fp32 moments by torch's kernel for many tensors: weights, gradients and both moments, each a list."""
    weights, grads, means, squares = map(list, tensors)
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        weights,
        grads,
        means,
        squares,
        [],
        steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=optimizer.grad_scale,
        found_inf=optimizer.found_inf,
    )


Parts = tuple[Tensor, ...]


def update_slice(
    weight: Tensor,
    grad: Tensor,
    mean: Parts,
    square: Parts,
    mean_code: Code | None,
    square_code: Code | None,
    rates: Rates,
) -> None:
    """Do one AdamW step on n blocks in place: weight and grad (n, 256) fp32, moments as `CompactAdamW._slices` yields them.

    Everything keeps this one shape. For a tensor that is flat in between, torch.compile would make a kernel and a buffer of its
    own.
    """
    g = grad / rates.grad_scale
    m = rates.keep * _unpack(mean, mean_code) + rates.new * g
    v = rates.keep_sq * _unpack(square, square_code) + rates.new_sq * g * g
    stepped = rates.decay * weight - rates.step_size * m / (v.sqrt() / rates.root + rates.eps)
    weight.copy_(torch.where(rates.skip, weight, stepped))
    for stored, new in ((mean, _pack(m, mean_code)), (square, _pack(v, square_code))):
        for old, value in zip(stored, new, strict=True):
            old.copy_(torch.where(rates.skip, old, value))


@functools.cache
def _compiled() -> Callable[..., None]:
    return torch.compile(update_slice, fullgraph=True)


def _pack(x: Tensor, code: Code | None) -> tuple[Tensor, ...]:
    return (x.bfloat16(),) if code is None else quantise(x, code)


def _unpack(stored: tuple[Tensor, ...], code: Code | None) -> Tensor:
    return stored[0].float() if code is None else dequantise(stored[0], stored[1], code)
