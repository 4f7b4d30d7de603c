"""The optimizer step that the torch recipes share: one global norm, one clip, one guard, then a fused update.

Clipping and loss scaling cost no pass over the gradients of their own: torch's fused kernels divide by `grad_scale` as they
read, and do nothing at all when `found_inf` is set. The host never waits for either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from gptscale.common.measure.offload import Offload, StepMeter
from gptscale.common.model.precision import LossScale
from gptscale.common.optim.compact_adamw import CompactAdamW
from gptscale.common.optim.stepper import Stepper
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.state import Shard, local, replicas, shard_of

ADAMW_STATE = ("exp_avg", "exp_avg_sq")


class FusedOptimizer(Stepper):
    """AdamW (moments in config.optimizer_state) or SGD over named fp32 parameters, which may be DTensors.

    shards: the processes that hold the other shards; None when every process holds all of every gradient. offloaded: the
    parameters were put into host memory, though the device is another, and this step is waited for there. copies: parameters
    that this many of `shards` hold alike, beside what their DTensor says (a tied table on the first and last stage).
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: RunConfig,
        *,
        shards: dist.ProcessGroup | None = None,
        offloaded: bool = False,
        copies: Mapping[str, int] | None = None,
    ) -> None:
        device = next(iter(parameters.values())).device
        super().__init__(device)
        self.parameters, self.group, self.clip = parameters, shards, config.clip_grad_norm
        self.copies = copies or {}
        self.offloaded = offloaded
        self.device = device
        self.loss_scale = LossScale(config.precision, self.device)
        # Sticky: after one non-finite step no later step may touch the weights, however late the host finds out.
        self.poisoned = torch.tensor(False, device=self.device)
        self.waits_s: list[float] = []
        groups = decay_groups(parameters.values(), config.weight_decay)
        if config.optimizer == "sgd":
            self.torch: torch.optim.Optimizer = PlainSGD(groups, {"lr": config.peak_lr})
            self.state_keys: tuple[str, ...] = ()
        else:
            betas, self.state_keys = (config.beta1, config.beta2), ADAMW_STATE
            if config.optimizer_state == "fp32":
                self.torch = torch.optim.AdamW(groups, lr=config.peak_lr, betas=betas, fused=True)
                self._create_state()
            else:
                self.torch = CompactAdamW(groups, lr=config.peak_lr, betas=betas, form=config.optimizer_state)
        self.meter = StepMeter(self.torch)

    def _create_state(self) -> None:
        """Zeroed AdamW state now, not at the first step, so that a checkpoint can be loaded in place before it."""
        for p in self.parameters.values():
            state = self.torch.state[p]
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            for key in ADAMW_STATE:
                state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)

    @property
    def scale(self) -> Tensor:
        """What the loss must be multiplied by before backward, ()."""
        return self.loss_scale.value

    def step(self, lr: float, loss: Tensor) -> Tensor:
        """Apply the gradients (scaled by the loss scale) at rate `lr`, zero them, return their global norm before clipping.

        `loss`: the global loss; if it or the norm is not finite, the weights stay as they are.
        """
        scale = self.loss_scale.value
        sum_partial_gradients(self.parameters.values())
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
        began_s = self.meter.total_s
        self.torch.step()
        self.waits_s.append(self.meter.total_s - began_s)
        self.torch.zero_grad(set_to_none=True)
        self.loss_scale.update(overflowed)
        return norm

    def _grad_norm(self) -> Tensor:
        """2-norm over all parameters and ranks, (): squares of the local shards, each counted once, summed over ranks."""
        by_replicas: dict[int, list[Tensor]] = {}
        for name, p in self.parameters.items():
            assert p.grad is not None, "every parameter of the model takes part in every step"
            by_replicas.setdefault(replicas(p) * self.copies.get(name, 1), []).append(local(p.grad))
        squares = [torch.stack(torch._foreach_norm(g)).float().square().sum() / n for n, g in by_replicas.items()]
        total = torch.stack(squares).sum()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total.sqrt()

    def state(self) -> Iterator[Shard]:
        """Weights, then AdamW's moments, as named boxes, all fp32.

        A moment that is stored otherwise is live only until the next box is asked for: then what is in it is stored again.
        """
        for name, p in self.parameters.items():
            yield shard_of(f"model/{name}", p)
        for name, p in self.parameters.items():
            for key in self.state_keys:
                box = f"adamw.{key}/{name}"
                if isinstance(self.torch, CompactAdamW):
                    moment = self.torch.moment(p, key)
                    yield shard_of(box, p)._replace(tensor=moment)
                    self.torch.set_moment(p, key, moment)
                else:
                    yield shard_of(box, self.torch.state[p][key])

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

    def nbytes(self) -> int:
        """What weights and optimizer state take here, in bytes."""
        tensors = [t for state in self.torch.state.values() for key, t in state.items() if key != "step"]
        return sum(local(t).nbytes for t in (*self.parameters.values(), *tensors))

    def offload(self) -> Offload | None:
        """Weights and optimizer state when they are on the host and the work is not, as under fsdp_offload."""
        if not self.offloaded:
            return None
        return Offload(cpu_bytes=self.nbytes(), waits_s=tuple(self.waits_s))


def sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Finish gradients that are each rank's sum over its own tokens, as sequence parallelism leaves those of norms.

    All of them in one all-reduce, where DTensor would make one for each as it is used.
    """
    partial = []
    for p in parameters:
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:  # type: ignore[attr-defined]
            assert p.grad.placements == (Partial(),), f"a gradient in {p.grad.placements}"
            partial.append(p)
    if not partial:
        return
    grads = [p.grad.to_local() for p in partial]  # type: ignore[union-attr]
    flat = torch.cat([g.flatten() for g in grads])
    mesh = partial[0].grad.device_mesh  # type: ignore[union-attr]
    dist.all_reduce(flat, group=mesh.get_group())
    for p, grad, total in zip(partial, grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))
        p.grad = DTensor.from_local(grad, mesh, [Replicate()], run_check=False)


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """The two groups that every optimizer here is given: matrices decay, vectors (norms, biases) do not."""
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": w} for w in (weight_decay, 0.0)]
    for p in parameters:
        shape = getattr(p, "ds_shape", p.shape)  # under ZeRO 3 a parameter looks empty and has its shape there
        groups[len(shape) < 2]["params"].append(p)
    return groups


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
