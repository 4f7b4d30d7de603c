"""The optimizer step that the torch recipes share: one global norm, one clip, one guard, then a fused update.

Clipping and loss scaling cost no pass over the gradients of their own: torch's fused kernels divide by `grad_scale` as they
read, and do nothing at all when `found_inf` is set. The host never waits for either.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptscale.common.config import RunConfig
from gptscale.common.precision import LossScale
from gptscale.common.state import Shard, local, replicas, shard_of

ADAMW_STATE = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW or SGD over named parameters, which may be DTensors sharded over `group`.

    Parameters: fp32. group: the processes that hold the other shards; None when every process holds all of every gradient.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: RunConfig, group: dist.ProcessGroup | None) -> None:
        self.parameters, self.group, self.clip = parameters, group, config.clip_grad_norm
        self.device = next(iter(parameters.values())).device
        self.loss_scale = LossScale(config.precision, self.device)
        # Sticky: after one non-finite step no later step may touch the weights, however late the host finds out.
        self.poisoned = torch.tensor(False, device=self.device)
        matrices = [p for p in parameters.values() if p.ndim >= 2]
        vectors = [p for p in parameters.values() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        if config.optimizer == "sgd":
            self.torch: torch.optim.Optimizer = PlainSGD(groups, {"lr": config.peak_lr})
            self.state_keys: tuple[str, ...] = ()
        else:
            betas = (config.beta1, config.beta2)
            self.torch = torch.optim.AdamW(groups, lr=config.peak_lr, betas=betas, fused=True)
            self.state_keys = ADAMW_STATE
            self._create_state()

    def _create_state(self) -> None:
        """Zeroed AdamW state now, not at the first step, so that a checkpoint can be loaded in place before it."""
        for p in self.parameters.values():
            state = self.torch.state[p]
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            for key in ADAMW_STATE:
                state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def step(self, lr: float, loss: Tensor) -> Tensor:
        """Apply the gradients (scaled by the loss scale) at rate `lr`, zero them, return their global norm before clipping.

        `loss`: the global loss; if it or the norm is not finite, the weights stay as they are.
        """
        scale = self.loss_scale.value
        norm = self._grad_norm() / scale
        overflowed = ~torch.isfinite(norm)
        lost = ~torch.isfinite(loss.to(self.device))
        self.poisoned |= lost if self.loss_scale.dynamic else lost | overflowed
        too_long = (
            (norm + 1e-6) / self.clip if self.clip else torch.zeros_like(norm)
        )  # 1e-6 as in torch's clip_grad_norm_
        self.torch.grad_scale = torch.clamp(too_long, min=1.0) * scale  # type: ignore[attr-defined]
        self.torch.found_inf = (self.poisoned | overflowed).float()  # type: ignore[attr-defined]
        for group in self.torch.param_groups:
            group["lr"] = lr
        self.torch.step()
        self.torch.zero_grad(set_to_none=True)
        self.loss_scale.update(overflowed)
        return norm

    def _grad_norm(self) -> Tensor:
        """2-norm over all parameters and ranks, (): squares of the local shards, each counted once, summed over ranks."""
        by_replicas: dict[int, list[Tensor]] = {}
        for p in self.parameters.values():
            assert p.grad is not None, "every parameter of the model takes part in every step"
            by_replicas.setdefault(replicas(p), []).append(local(p.grad))
        squares = [torch.stack(torch._foreach_norm(g)).float().square().sum() / n for n, g in by_replicas.items()]
        total = torch.stack(squares).sum()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total.sqrt()

    def state(self) -> Iterator[Shard]:
        """The optimizer's tensors as named boxes."""
        for name, p in self.parameters.items():
            for key in self.state_keys:
                yield shard_of(f"adamw.{key}/{name}", self.torch.state[p][key])

    def counters(self) -> dict[str, float]:
        """Steps applied (skipped ones not counted), and the loss scale with its run of good steps."""
        steps = [state["step"] for state in self.torch.state.values()]
        return {
            "optimizer_steps": steps[0].item() if steps else 0.0,
            "loss_scale": self.loss_scale.value.item(),
            "loss_scale_good_steps": self.loss_scale.good_steps.item(),
        }

    def load_counters(self, counters: dict[str, float]) -> None:
        """Restore `counters()`."""
        for state in self.torch.state.values():
            state["step"].fill_(counters["optimizer_steps"])
        if self.loss_scale.dynamic:
            self.loss_scale.value.fill_(counters["loss_scale"])
            self.loss_scale.good_steps.fill_(counters["loss_scale_good_steps"])


class PlainSGD(torch.optim.Optimizer):
    """w -= lr (g / grad_scale + weight_decay w), unless found_inf; on local shards.

    torch's own fused SGD has no rule for DTensors (2.11), and its other forms ignore grad_scale and found_inf.
    """

    grad_scale: Tensor
    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                weight = local(p)
                update = local(p.grad) / self.grad_scale + group["weight_decay"] * weight
                weight.sub_(torch.where(self.found_inf > 0, 0.0, group["lr"] * update))
