"""The optimizers of Colossal-AI's LowLevelZeroPlugin and GeminiPlugin as Steppers.

This file depends on two internal facts of Colossal-AI (0.5.0): where a rank's part of each parameter lies, and how the norm is
computed before the step. The names used are those of zero/low_level/low_level_optim.py and zero/gemini/gemini_optimizer.py.
Both optimizers need a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptscale.common.engines.colossal.weights import FlatLayout, fill
from gptscale.common.measure.live_state import Offload, StateTensor, held_by_torch, tensors_in
from gptscale.common.optim.fused import decay_groups
from gptscale.common.optim.library import LibraryOptimizer
from gptscale.common.optim.stepper import Stepper
from gptscale.common.settings.optimizers import ADAMW_STATE
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.state import Shard


class LowLevelZeroStepper(LibraryOptimizer):
    """The Stepper over a LowLevelZeroOptimizer, which flattens each parameter, pads it, and cuts it evenly over the ranks.

    Colossal-AI clips inside its own step, by the plugin's max_norm. The norm is computed once more before that step, because
    the engine has to look at it first.
    """

    def __init__(self, run: Run, zero: Any, working: dict[str, nn.Parameter]) -> None:
        self.zero, self.working = zero, working
        masters = {
            id(p): master
            for group, parameters in zero._working_param_groups.items()
            for p, master in zip(parameters, zero._master_param_groups_of_current_rank[group], strict=True)
        }
        parameters = {name: masters[id(p)] for name, p in working.items()}
        rank = dist.get_rank()
        layout = FlatLayout(run.gpt, {n: (tuple(p.shape), rank * parameters[n].numel()) for n, p in working.items()})
        super().__init__(zero, zero.optim, parameters, run.config, clip=self.norm, boxes=layout.boxes)
        fill(self.state(), run.gpt, run.config.seed)
        self.publish()

    def norm(self, max_norm: float) -> Tensor:
        """Return the global norm of the gradients, (), and clip nothing yet."""
        square = 0.0
        for group in range(self.zero.num_param_groups):
            for store in self.zero.pg_to_grad_store.values():
                gradients = store.get_working_grads_by_group_id(group)
                square += self.zero._compute_grad_norm(dp_pg=store.torch_pg, gradients=gradients) ** 2
        return torch.tensor(square, device=self.scale.device).sqrt()

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield the tensors of the state. Gradients are in Colossal-AI's stores, and fp32 weights belong to the optimizer."""
        yield from held_by_torch(self.working.values(), self.inner)
        for store in self.zero.pg_to_grad_store.values():
            yield from (StateTensor("gradients", tensor) for tensor in tensors_in(store._grads_of_params))
        yield from (StateTensor("optimizer", p) for p in self.parameters.values())

    @torch.no_grad()
    def publish(self) -> None:
        """Gather the weights that are computed with from the master weights of every rank."""
        for name, p in self.working.items():
            padded = self.zero._working_param_to_padded_working_param[p]
            dist.all_gather_into_tensor(padded, self.parameters[name].to(padded), group=self.zero.param_to_pg[p])


class GeminiStepper(Stepper):
    """The Stepper over a GeminiOptimizer, which lays parameters one after another in chunks and cuts each over the ranks.

    working: the parameters that are computed with, by our names. Their storage comes and goes, their shape stays.
    """

    def __init__(self, run: Run, gemini: Any, working: dict[str, nn.Parameter]) -> None:
        super().__init__(run.world.device)
        self.gemini, self.inner, self.poisoned = gemini, gemini.optim, False
        self.max_norm = run.config.clip_grad_norm or torch.inf
        names = {id(p): name for name, p in working.items()}
        ids = {i: names[id(p)] for i, p in gemini.id_to_real_params.items() if i in gemini.id_to_fake_params}
        self.fakes = {name: gemini.id_to_fake_params[i] for i, name in ids.items()}
        # They are NumPy's integers, which a checkpoint's manifest does not take.
        begins = {name: int(gemini.get_offsets(i)[1]) for i, name in ids.items()}
        self.layout = FlatLayout(run.gpt, {name: (tuple(working[name].shape), begin) for name, begin in begins.items()})
        # The state is created now, not at the first step, so that a checkpoint can be loaded in place.
        for fake in self.fakes.values():
            master = self._master(fake)
            self.inner.state[fake] = {"step": 0, **{key: torch.zeros_like(master) for key in ADAMW_STATE}}
        fill(self.state(), run.gpt, run.config.seed)
        self.publish()

    def step(self, lr: float, loss: Tensor) -> Tensor:
        norm = float(self.gemini._calc_global_norm())
        # Once set it stays set.
        self.poisoned = self.poisoned or not (math.isfinite(norm) and self.is_finite(loss))
        if self.poisoned:
            self.gemini.zero_grad()
        else:
            for group in self.gemini.param_groups:
                group["lr"] = lr
            self._clip_on_host(norm)
            # Gemini's step computes the norm again; give it this one.
            self.gemini._calc_global_norm = lambda: norm
            try:
                self.gemini.step()
            finally:
                del self.gemini._calc_global_norm
        return torch.tensor(norm, device=self.scale.device)

    def state(self) -> Iterator[Shard]:
        """Yield the boxes of fp32 weights, then of AdamW's state, which lie on the device or on the host."""
        for name, fake in self.fakes.items():
            yield from self.layout.boxes(f"model/{name}", self._master(fake))
        for name, fake in self.fakes.items():
            for key in ADAMW_STATE:
                yield from self.layout.boxes(f"adamw.{key}/{name}", self.inner.state[fake][key])

    def counters(self) -> dict[str, float]:
        steps = [float(state["step"]) for state in self.inner.state.values()]
        return {"optimizer_steps": max(steps, default=0.0), "loss_scale": 1.0, "loss_scale_good_steps": 0.0}

    def load_counters(self, counters: dict[str, float]) -> None:
        """Restore `counters()`, and publish the weights that were loaded before."""
        for state in self.inner.state.values():
            state["step"] = int(counters["optimizer_steps"])
        self.publish()

    def publish(self) -> None:
        """Bring the weights that are computed with up to the fp32 weights, chunk by chunk."""
        for chunk in self.gemini.chunk16_set:
            chunk.optim_update()

    def offload(self) -> Offload | None:
        """Return what offload_optim_frac and offload_param_frac have moved to the host."""
        on_host = sum(shard.tensor.nbytes for shard in self.state() if shard.tensor.device.type == "cpu")
        return Offload(cpu_bytes=on_host) if on_host else None

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield the chunks of weights and gradients, and the state in 32 bits."""
        for chunk in self.gemini.chunk16_set:
            yield StateTensor("weights", chunk.payload)
            if chunk.grad_chunk is not None:
                yield StateTensor("gradients", chunk.grad_chunk.payload)
        for fake in self.fakes.values():
            yield StateTensor("optimizer", self._master(fake))
            yield from (StateTensor("optimizer", self.inner.state[fake][key]) for key in ADAMW_STATE)

    def _clip_on_host(self, norm: float) -> None:
        """Clip the gradients that lie on the host, because HybridAdam clips on the device only.

        Its code for 16-bit gradients on the host leaves div_scale out.
        """
        factor = self.max_norm / (norm + 1e-6)
        if factor >= 1:
            return
        for chunk in self.gemini.chunk16_set:
            if chunk.grad_chunk.device_type == "cpu":
                chunk.grad_chunk.payload.mul_(factor)

    def _master(self, fake: nn.Parameter) -> Tensor:
        begin, end = self.gemini.param_to_range[fake]
        payload: Tensor = self.gemini.param_to_chunk16[fake].paired_chunk.payload
        return payload[begin:end]


def hybrid_adam(model: nn.Module, config: RunConfig) -> Any:
    """Return Colossal-AI's AdamW, for tensors on the device and on the host, the only optimizer that Gemini accepts."""
    from colossalai.nn.optimizer import HybridAdam

    groups = decay_groups(model.parameters(), config.weight_decay)
    return HybridAdam(groups, lr=config.peak_lr, betas=(config.beta1, config.beta2), adamw_mode=True)
