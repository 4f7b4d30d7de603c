"""The optimizer step that torch's own recipes share: one global norm, clipping, a guard against NaN, then a fused update.

Clipping and loss scaling need no extra pass over the gradients. The fused kernels of torch divide each gradient by `grad_scale`
as they read it, and change nothing if `found_inf` is set. The host never waits for either of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptscale.common.errors import ConfigError
from gptscale.common.measure.live_state import Offload, StateTensor, StepMeter, held_by_torch
from gptscale.common.model.precision import LossScale
from gptscale.common.optim.compact_adamw import CompactAdamW
from gptscale.common.optim.stepper import Stepper
from gptscale.common.settings.optimizers import OPTIMIZERS
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.state import Shard, is_dtensor, local, replicas, shard_of


class FusedOptimizer(Stepper):
    """The Stepper with an optimizer of the table over named fp32 parameters, which may be DTensors.

    shards: the processes that hold the other shards, or None if every process holds all of every gradient.
    offloaded: the parameters lie in host memory although the model computes on another device, so the host waits for this step.
    copies: for some parameters, how many of `shards` hold the same one, beyond what their DTensors say. The tied table on the
    first and last pipeline stage is such a parameter.
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
        self.copies, self.tp_size = copies or {}, config.tp_size or 1
        self.offloaded = offloaded
        self.device = device
        self.loss_scale = LossScale(config.precision, self.device)
        # Once set it stays set: after one step that was not finite, no later step may change the weights. The host may notice it
        # only many steps later.
        self.poisoned = torch.tensor(False, device=self.device)
        self.waits_s: list[float] = []
        self.name, row = config.optimizer, OPTIMIZERS[config.optimizer]
        self.state_keys = (*row.state_keys, *row.matrix_keys)
        self.torch: torch.optim.Optimizer = import_module(row.module).fused(parameters, config)
        if not self.torch.state:
            create_state(self.torch, parameters.values(), self.state_keys)
        self.meter = StepMeter(self.torch)

    @property
    def scale(self) -> Tensor:
        return self.loss_scale.value

    def step(self, lr: float, loss: Tensor) -> Tensor:
        """Step by the gradients of a loss that was multiplied by `scale`, and return the norm of these divided by it, ()."""
        scale = self.loss_scale.value
        sum_partial_gradients(self.parameters.values())
        norm = self._grad_norm() / scale
        overflowed = ~torch.isfinite(norm)
        bad_loss = ~torch.isfinite(loss.to(self.device))
        # With a dynamic loss scale an overflow of the gradients is no fault: the step is skipped and the scale falls.
        self.poisoned |= bad_loss if self.loss_scale.dynamic else bad_loss | overflowed
        # 1e-6 as in torch's clip_grad_norm_
        excess = (norm + 1e-6) / self.clip if self.clip else torch.zeros_like(norm)
        self.torch.grad_scale = torch.clamp(excess, min=1.0) * scale  # type: ignore[attr-defined]
        left_out = self.skips is not None and self.skips(loss, norm)
        self.torch.found_inf = (self.poisoned | overflowed | left_out).float()  # type: ignore[attr-defined]
        for group in self.torch.param_groups:
            group["lr"] = lr
        began_s = self.meter.total_s
        self.torch.step()
        self.waits_s.append(self.meter.total_s - began_s)
        self.torch.zero_grad(set_to_none=True)
        self.loss_scale.update(overflowed)
        return norm

    def _grad_norm(self) -> Tensor:
        """Return the 2-norm of the gradient over all parameters and ranks, ().

        It is the root of the squares of all local shards, summed over the ranks. A shard that n ranks hold counts 1/n on each.
        """
        by_replicas: dict[int, list[Tensor]] = {}
        for name, p in self.parameters.items():
            if p.grad is None:
                fix = "use a model in which every weight gets one"
                raise ConfigError(f"{name} got no gradient", "in this step", fix)
            # A weight that tensor ranks do not cut is on each of them.
            is_cut = is_dtensor(p) and "tp" in (p.device_mesh.mesh_dim_names or ())
            holders = replicas(p) * self.copies.get(name, 1) * (1 if is_cut else self.tp_size)
            by_replicas.setdefault(holders, []).append(local(p.grad))
        squares = [torch.stack(torch._foreach_norm(g)).float().square().sum() / n for n, g in by_replicas.items()]
        total = torch.stack(squares).sum()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total.sqrt()

    def state(self) -> Iterator[Shard]:
        """Yield the weights, then the state of the optimizer, as named boxes in fp32.

        A moment that is stored in another precision is unpacked for its box. When the next box is asked for, the contents of the
        box are packed and stored again, so that a checkpoint can be loaded into it.
        """
        for name, p in self.parameters.items():
            yield shard_of(f"model/{name}", p)
        for name, p in self.parameters.items():
            for key in (key for key in self.state_keys if key in self.torch.state[p]):
                box = f"{self.name}.{key}/{name}"
                if isinstance(self.torch, CompactAdamW):
                    moment = self.torch.moment(p, key)
                    yield shard_of(box, p)._replace(tensor=moment)
                    self.torch.set_moment(p, key, moment)
                else:
                    yield shard_of(box, self.torch.state[p][key])

    def counters(self) -> dict[str, float]:
        """Return the steps applied, without skipped ones, the loss scale, and the good steps since it last changed."""
        steps = [state["step"] for state in self.torch.state.values()]
        return {
            "optimizer_steps": steps[0].item() if steps else 0.0,
            "loss_scale": self.loss_scale.value.item(),
            "loss_scale_good_steps": self.loss_scale.good_steps.item(),
        }

    def load_counters(self, counters: dict[str, float]) -> None:
        for state in self.torch.state.values():
            state["step"].fill_(counters["optimizer_steps"])
        if self.loss_scale.dynamic:
            self.loss_scale.value.fill_(counters["loss_scale"])
            self.loss_scale.good_steps.fill_(counters["loss_scale_good_steps"])

    def nbytes(self) -> int:
        """Return the bytes of the weights and the optimizer state of this process."""
        tensors = [t for state in self.torch.state.values() for key, t in state.items() if key != "step"]
        return sum(local(t).nbytes for t in (*self.parameters.values(), *tensors))

    def state_tensors(self) -> Iterator[StateTensor]:
        return held_by_torch(self.parameters.values(), self.torch, on_host=self.offloaded)

    def offload(self) -> Offload | None:
        """Return what weights and optimizer state take in host memory under offload (fsdp_offload), else None."""
        if not self.offloaded:
            return None
        return Offload(cpu_bytes=self.nbytes(), waits_s=tuple(self.waits_s))


def sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum over ranks the gradients in which each rank has counted only its own tokens.

    Sequence parallelism leaves the gradients of LayerNorms so. All of them go into one all-reduce, where DTensor would start one
    for each gradient as it is used.
    """
    partial = [p for p in parameters if is_dtensor(p.grad) and p.grad.placements != p.placements]  # type: ignore[attr-defined]
    if not partial:
        return
    from torch.distributed.tensor import DTensor, Partial, Replicate

    for p in partial:
        placements = p.grad.placements  # type: ignore[union-attr]
        assert placements == (Partial(),), f"a gradient in {placements}"
    grads = [p.grad.to_local() for p in partial]  # type: ignore[union-attr]
    flat = torch.cat([g.flatten() for g in grads])
    mesh = partial[0].grad.device_mesh  # type: ignore[union-attr]
    dist.all_reduce(flat, group=mesh.get_group())
    for p, grad, total in zip(partial, grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))
        p.grad = DTensor.from_local(grad, mesh, [Replicate()], run_check=False)


def create_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], keys: Sequence[str]) -> None:
    """Create zeroed state before the first step, so that a checkpoint can be loaded into it in place."""
    for p in parameters if keys else ():
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p].update({"step": step, **{key: torch.zeros_like(p) for key in keys}})


def decay_groups(
    parameters: Iterable[nn.Parameter],
    weight_decay: float,
    shape_of: Callable[[nn.Parameter], Sequence[int]] = lambda parameter: parameter.shape,
) -> list[dict[str, Any]]:
    """Sort parameters into the groups of every optimizer: matrices decay, vectors do not, and no group is of two meshes.

    shape_of: returns the shape of a parameter, for a library whose parameters do not have it in `shape`.
    """
    matrices: dict[Any, list[nn.Parameter]] = {None: []}
    vectors: dict[Any, list[nn.Parameter]] = {None: []}
    for p in parameters:
        kind = matrices if len(shape_of(p)) > 1 else vectors
        kind.setdefault(p.device_mesh if is_dtensor(p) else None, []).append(p)
    groups = [{"params": group, "weight_decay": weight_decay} for group in matrices.values()]
    return groups + [{"params": group, "weight_decay": 0.0} for group in vectors.values()]
