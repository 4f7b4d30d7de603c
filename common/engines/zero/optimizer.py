"""DeepSpeed's ZeRO optimizers as a Stepper: their step, and their state as named boxes.

This file depends on one internal fact of DeepSpeed (0.19.8): where a rank's part of each parameter lies in its flat fp32
vectors. The names used are those of runtime/zero/stage_1_and_2.py and stage3.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gptscale.common.engines.flat_shards import shards_of_range
from gptscale.common.engines.zero.io_meter import TRAFFIC
from gptscale.common.engines.zero.swap_folder import SwapFolder, nbytes_under
from gptscale.common.errors import CheckpointError, ConfigError, NumericError
from gptscale.common.measure.live_state import Offload, StateTensor, StepMeter, live_state, tensors_in
from gptscale.common.model.initial_weights import init_weights
from gptscale.common.optim.stepper import Stepper
from gptscale.common.settings.optimizers import OPTIMIZERS, OptimizerName
from gptscale.common.settings.shape import ModelConfig
from gptscale.common.state import Shard

# The attribute in which each of DeepSpeed's optimizers keeps this rank's fp32 weights. BF16_Optimizer is stage 1 in bf16.
FLAT_VECTORS = {
    "DeepSpeedZeroOptimizer": "single_partition_of_fp32_groups",
    "DeepSpeedZeroOptimizer_Stage3": "fp32_partitioned_groups_flat",
    "BF16_Optimizer": "fp32_groups_flat_partition",
}
# The attributes of these optimizers with reduced gradients: stages 1 and 2, stage 3, BF16_Optimizer.
GRADIENTS = re.compile("averaged_gradients|grad_partitions_flat_buffer|fp32_groups_gradients")


def load_own(engine: Any, folder: Path) -> int:
    """Load a checkpoint that DeepSpeed's save_checkpoint left, and return the step it was saved at.

    Raises ConfigError if the optimizer of `engine` is not DeepSpeed's.
    """
    optimizer = getattr(engine, "optimizer", None)
    if not isinstance(optimizer, ZeroOptimizer):
        what = "this recipe reads no checkpoint of DeepSpeed's"
        raise ConfigError(what, f"in {folder}", "resume it with the zero recipe that saved it")
    return optimizer.load_own(folder)


def count_up(cpu_adam: Any, steps: int) -> None:
    """Let a DeepSpeedCPUAdam compute the powers of its betas as if it had done `steps` steps.

    It multiplies them up in fp32, step by step. One that starts at a later step would call pow(), whose last bit differs, and
    a resumed run would leave the path of the unbroken one. It takes some microseconds per step.
    """
    parameter, grad, *state = (torch.zeros(1) for _ in range(4))
    options = cpu_adam.defaults
    for step in range(1, steps + 1):
        cpu_adam.ds_opt_adam.adam_update(
            cpu_adam.opt_id, step, 0.0, *options["betas"], options["eps"], 0.0, True, parameter, grad, *state
        )


def full_shape(parameter: Any) -> torch.Size:
    """Return the shape of a parameter, which at ZeRO stage 3 looks empty and has its shape in `ds_shape`."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


class Piece(NamedTuple):
    """A rank's part of one parameter: elements `begin` to `begin + numel` of it, at index `at` of flat vector `group`."""

    name: str
    shape: tuple[int, ...]
    begin: int
    group: int
    at: int
    numel: int


class ZeroOptimizer(Stepper):
    """The Stepper over a DeepSpeedEngine `ds` at ZeRO stage 1, 2 or 3, with the state of optimizer `name`."""

    def __init__(self, ds: Any, names: dict[str, Any], *, name: OptimizerName, swap: SwapFolder | None = None) -> None:
        # `scale` stays 1, because DeepSpeed scales the loss itself.
        super().__init__(ds.device)
        self.ds, self.zero, self.inner = ds, ds.optimizer, ds.optimizer.optimizer
        self.name, self.state_keys = name, OPTIMIZERS[name].state_keys
        self.stage = ds.zero_optimization_stage()
        self.poisoned = False
        self.dynamic = bool(ds.fp16_enabled())
        self.pieces = sorted(self._pieces(names), key=lambda piece: (piece.group, piece.at))
        self._create_state()
        self.swap, self.meter, self.waits_s = swap, StepMeter(self.inner), list[float]()
        # Setting up is no part of a step.
        self._waited_s = TRAFFIC.waited_s

    def step(self, lr: float, loss: Tensor) -> Tensor:
        """Do DeepSpeed's step at rate `lr`, unless the loss is not finite.

        Reading the loss costs no extra wait, because DeepSpeed waits for the device anyway to look at the norm.
        """
        if self.poisoned or not self.is_finite(loss):
            # Once set it stays set, as in common/optim/fused.py.
            self.poisoned = True
            return torch.full_like(loss, torch.nan)
        for group in self.inner.param_groups:
            group["lr"] = lr
        try:
            self.ds.step()
        except Exception as error:
            # DeepSpeed raises a bare Exception.
            if "loss scale already at minimum" not in str(error):
                raise
            what = "the fp16 loss scale is at its floor of 1 and steps still overflow"
            raise NumericError(what, "in DeepSpeed", "lower --lr, or use bf16") from error
        self.waits_s.append(self.meter.total_s + TRAFFIC.waited_s - self._waited_s)
        self._waited_s += self.waits_s[-1]
        norm = torch.as_tensor(self.ds.get_global_grad_norm(), dtype=torch.float32, device=loss.device)
        # DeepSpeed skips a step whose norm is not finite. With fp16's loss scaling that is normal; otherwise it ends the run.
        self.poisoned = not (self.dynamic or self.is_finite(norm))
        return norm

    def state(self) -> Iterator[Shard]:
        """Yield the boxes of master weights and optimizer state, flat vector by flat vector.

        A vector that lives on disk is in memory only while its boxes are in use; then it is written back.
        """
        for group, flat in enumerate(self._flats()):
            swapped = self._swaps(group)
            if swapped:
                self.zero._optimizer_states_and_gradient_swap_in(group)
            for piece in self.pieces:
                if piece.group == group:
                    yield from self._boxes(piece, "model", flat)
                    for key in self.state_keys:
                        yield from self._boxes(piece, f"{self.name}.{key}", self.inner.state[flat][key])
            if self.stage == 3:
                # Bring the weights that are computed with up to the master weights.
                self.zero._reassign_or_swap_out_partitioned_parameters(group)
            if swapped:
                self.zero._optimizer_states_and_gradient_swap_out(group)

    def initialise(self, gpt: ModelConfig, seed: int) -> None:
        """Set the initial weights in fp32, whatever DeepSpeed rounded them to before."""
        init_weights((shard for shard in self.state() if shard.name.startswith("model/")), gpt, seed)
        self.publish()

    def publish(self) -> None:
        """Bring the weights that are computed with up to the master weights, in a call that every rank must make."""
        if self.stage == 3:
            # Small parameters stay gathered, and DeepSpeed would not gather them again.
            self.zero._partition_all_parameters()
            if self.zero.persistent_parameters:
                self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)
            return
        self.zero.update_lp_params()

    def counters(self) -> dict[str, float]:
        """Return the steps applied, the loss scale, and the number of good steps in a row."""
        steps = [float(self.inner.state[flat]["step"]) for flat in self._flats()] if self.state_keys else [0.0]
        scale, good = 1.0, 0.0
        if self.dynamic:
            scaler = self.zero.loss_scaler
            scale, good = float(scaler.cur_scale), float(scaler.cur_iter - scaler.last_overflow_iter - 1)
        return {"optimizer_steps": steps[0], "loss_scale": scale, "loss_scale_good_steps": good}

    def load_counters(self, counters: dict[str, float]) -> None:
        """Restore `counters()`, and publish the weights that were loaded before."""
        if self.state_keys:
            for flat in self._flats():
                step = self.inner.state[flat]["step"]
                steps = counters["optimizer_steps"]
                self.inner.state[flat]["step"] = torch.full_like(step, steps) if torch.is_tensor(step) else int(steps)
            if hasattr(self.inner, "ds_opt_adam"):
                count_up(self.inner, int(counters["optimizer_steps"]))
        if self.dynamic:
            scaler = self.zero.loss_scaler
            scaler.cur_scale = counters["loss_scale"]
            scaler.last_overflow_iter = scaler.cur_iter - int(counters["loss_scale_good_steps"]) - 1
        self.publish()

    def load_own(self, folder: Path) -> int:
        """Load what DeepSpeed's save_checkpoint left in `folder`, which is that of one step, and return the step.

        DeepSpeed unpickles its files, which can run any code.
        """
        where = f"in {folder}"
        if self.swap:
            what = "DeepSpeed cannot load it into NVMe"
            raise ConfigError(what, where, "load it with zero3 and save, then resume from that")
        if self.ds.load_checkpoint(str(folder.parent), tag=folder.name)[0] is None:
            raise CheckpointError("DeepSpeed found no checkpoint", where, "give the folder of one step")
        self.publish()
        return int(self.ds.global_steps)

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield the tensors of the state that are in memory. Weights that stage 3 has gathered are none."""
        offload = self.ds.zero_offload_optimizer()
        on_host = offload is not None and offload.device != "none"
        for p in self.ds.module.parameters():
            if self.stage != 3:
                yield StateTensor("weights", p)
            elif p.ds_tensor.status.name == "AVAILABLE":
                yield StateTensor("weights", p.ds_tensor, on_host)
        flats = [flat for group, flat in enumerate(self._flats()) if not self._swaps(group)]
        of_flats = [flat.grad for flat in flats if flat.grad is not None]
        of_weights = [p.grad for p in self.ds.module.parameters() if p.grad is not None]
        yield from (StateTensor("gradients", g, on_host) for g in of_flats)
        yield from (StateTensor("gradients", g) for g in of_weights)
        # Stage 3 sums them where the optimizer is, the others on the device.
        summed_on_host = on_host and self.stage == 3
        buffers = [value for name, value in vars(self.zero).items() if GRADIENTS.search(name)]
        yield from (StateTensor("gradients", g, summed_on_host) for g in tensors_in(buffers))
        for flat in flats:
            yield StateTensor("optimizer", flat, on_host)
            yield from (StateTensor("optimizer", t, on_host) for t in tensors_in(self.inner.state[flat]))

    def disk_bytes(self) -> int:
        """Return this process's part of the files of its node."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        return nbytes_under(self.swap.path) // ranks if self.swap else 0

    def offload(self) -> Offload | None:
        """Return what ZeRO-Offload and ZeRO-Infinity keep off the device, and the traffic of the latter's files."""
        zero = self.ds.zero_offload_optimizer()
        if zero is None or zero.device == "none":
            return None
        resting = (entry for entry in self.state_tensors() if entry.kind != "gradients")
        return Offload(
            cpu_bytes=live_state(resting, self.ds.device).host,
            disk_bytes=nbytes_under(self.swap.path) if self.swap else 0,
            read_bytes_per_s=TRAFFIC.read_bytes / TRAFFIC.read_s if TRAFFIC.read_s else None,
            write_bytes_per_s=TRAFFIC.written_bytes / TRAFFIC.write_s if TRAFFIC.write_s else None,
            waits_s=tuple(self.waits_s),
        )

    def close(self) -> None:
        if self.swap:
            self.swap.close()

    def _flats(self) -> list[Tensor]:
        """Return this rank's fp32 vectors: one per parameter group, or at stage 3 one per sub-group of it."""
        flats: list[Tensor] = getattr(self.zero, FLAT_VECTORS[type(self.zero).__name__])
        return flats

    def _swaps(self, group: int) -> bool:
        return self.stage == 3 and bool(self.zero._swappable_optimizer_subgroup(group))

    def _pieces(self, names: dict[str, Any]) -> Iterator[Piece]:
        for name, parameter in names.items():
            if self.stage == 3:
                group, at, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
                begin = parameter.partition_numel() * dist.get_rank()
                # The part of the last rank is padded.
                numel = min(parameter.partition_numel(), parameter.ds_numel - begin)
                if numel > 0:
                    yield Piece(name, tuple(full_shape(parameter)), begin, group, at, numel)
            elif (mapping := parameter._hp_mapping) is not None:
                lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield Piece(name, tuple(parameter.shape), lp.start, mapping.param_group_index, hp.start, hp.numel)

    def _boxes(self, piece: Piece, kind: str, flat: Tensor) -> Iterator[Shard]:
        part = flat.detach()[piece.at : piece.at + piece.numel]
        return shards_of_range(f"{kind}/{piece.name}", part, piece.shape, piece.begin)

    def _create_state(self) -> None:
        """Create zeroed state now, so that a checkpoint can be loaded in place before the first step."""
        if not self.state_keys:
            return
        # DeepSpeedCPUAdam counts its steps in a Python int.
        integer_step = hasattr(self.inner, "ds_opt_adam")
        for group, flat in enumerate(self._flats()):
            swapped = self._swaps(group)
            if swapped:
                self.zero._optimizer_states_and_gradient_swap_in(group)
            state = self.inner.state[flat]
            state["step"] = 0 if integer_step else torch.zeros((), dtype=torch.float32, device=flat.device)
            for key in self.state_keys:
                state[key] = torch.zeros_like(flat, requires_grad=False)
            if swapped:
                # DeepSpeed's swapper learns of the new state when it writes it.
                self.zero._optimizer_states_and_gradient_swap_out(group)
