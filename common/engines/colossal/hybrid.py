"""The engines for models that Colossal-AI's HybridParallelPlugin cuts: one without pipeline stages, one with them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptscale.common.engine import Batch, StepResult
from gptscale.common.engines.colossal.checks import bubble_fraction
from gptscale.common.engines.colossal.weights import TensorLayout, cut_dim, fill, named_parameters
from gptscale.common.engines.torch_engine import SteppedEngine, TorchEngine, holding_back
from gptscale.common.measure.bubble import BACKWARD, FORWARD, Bubble, StageClock
from gptscale.common.measure.live_state import StateTensor, held_by_torch
from gptscale.common.optim.library import LibraryOptimizer
from gptscale.common.process.progress import progress
from gptscale.common.settings.run import Run
from gptscale.common.settings.shape import TABLE

# The attributes in which Colossal-AI's schedule records the metadata of its transfers.
TRANSFER_METADATA = ("send_tensor_metadata", "send_grad_metadata", "tensor_metadata_recv", "grad_metadata_recv")


class HybridOptimizer(LibraryOptimizer):
    """The Stepper over Colossal-AI's optimizer, with its step and its fp32 master weights, but with a correct global norm.

    Under tensor parallelism, upstream divides the squares of `c_attn` and `c_fc` by the number of ranks, as if each rank had all
    of them, because it does not recognise them as distributed tensors. So the norm is computed here. A parameter that is cut
    counts on each rank. One that several ranks have (all tensor ranks; for the tied table, two stages) counts once.
    """

    def __init__(self, run: Run, plugin: Any, boosted: Any, optimizer: Any) -> None:
        self.plugin, self.run = plugin, run
        self.working = named_parameters(boosted.unwrap(), run.gpt)
        masters = getattr(optimizer, "working_to_master_map", {})
        tp_size = dist.get_world_size(plugin.tp_group)
        self.copies = {name: tp_size if cut_dim(name, run.gpt) is None else 1 for name in self.working}
        if plugin.pp_size > 1 and TABLE in self.copies:
            self.copies[TABLE] *= 2
        layout = TensorLayout(run.gpt, dist.get_rank(plugin.tp_group), tp_size)
        held, clip = {name: masters.get(p, p) for name, p in self.working.items()}, self.clip_gradients
        super().__init__(optimizer, optimizer.optim, held, run.config, clip=clip, boxes=layout.boxes)
        fill(self.state(), run.gpt, run.config.seed)
        self.publish()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients so that the norm over the whole model is at most `max_norm`, and return that norm before, ()."""
        grads = {name: p.grad for name, p in self.working.items() if p.grad is not None}
        norms = {name: torch.linalg.vector_norm(grad, dtype=torch.float32) for name, grad in grads.items()}
        total = torch.stack([norm.square() / self.copies[name] for name, norm in norms.items()]).sum()
        for group in (self.plugin.tp_group, self.plugin.pp_group):
            dist.all_reduce(total, group=group)
        norm = total.sqrt()
        torch._foreach_mul_(list(grads.values()), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield the tensors of the state. In bf16 the fp32 weights belong to the optimizer."""
        yield from held_by_torch(self.working.values(), self.inner)
        yield from (StateTensor("optimizer", p) for p in self.parameters.values())

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the bf16 weights that are computed with up to the fp32 weights."""
        for name, p in self.working.items():
            if p is not self.parameters[name]:
                p.copy_(self.parameters[name])


class DropoutStreams:
    """The random streams of dropout, as a pure function of (seed, step, data rank, stage).

    The dropout of attention also depends on the tensor rank and the layer. Under tensor parallelism, upstream gives it a
    generator of its own, once. Here each step makes that generator anew, so that a checkpoint need not save it.
    """

    def __init__(self, run: Run, plugin: Any, model: nn.Module) -> None:
        self.seed, self.tp_rank = run.config.seed, dist.get_rank(plugin.tp_group)
        self.stage = dist.get_rank(plugin.pp_group)
        self.dropouts = [m for m in model.modules() if hasattr(m, "randomizer") and isinstance(m, nn.Dropout)]

    def start(self, step: int, data_rank: int) -> None:
        key = f"{self.seed} {step} {data_rank} {self.stage}"
        for layer, dropout in enumerate(self.dropouts):
            dropout.randomizer = type(dropout.randomizer)(zlib.crc32(f"{key} {self.tp_rank} {layer}".encode()))
        torch.manual_seed(zlib.crc32(key.encode()))


class BoostedModel(nn.Module):
    """A model with forward(inputs, targets) for TorchEngine, without autocast, because Colossal-AI casts by itself."""

    def __init__(self, boosted: nn.Module) -> None:
        super().__init__()
        self.boosted = boosted
        # Called once, before the next micro-batch.
        self.begin: Callable[[], None] | None = None

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss, ()."""
        if self.begin is not None:
            self.begin()
            self.begin = None
        with torch.autocast(inputs.device.type, enabled=False):
            loss: Tensor = self.boosted(inputs, targets)
        return loss


class ColossalTensorEngine(TorchEngine):
    """The torch engine over a boosted model without pipeline stages, with Colossal-AI's backward and dropout streams."""

    def __init__(self, run: Run, plugin: Any, boosted: Any, optimizer: Any) -> None:
        self.boosted, self.streams = BoostedModel(boosted), DropoutStreams(run, plugin, boosted)
        stepper, sync = HybridOptimizer(run, plugin, boosted, optimizer), holding_back(boosted.no_sync)
        back = optimizer.backward
        super().__init__(run, self.boosted, stepper, group=plugin.dp_group, set_grad_sync=sync, backward=back)

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        self.boosted.begin = partial(self.streams.start, batch.step, self.data_rank)
        return super().train_step(batch, lr)


class ColossalPipelineEngine(SteppedEngine):
    """Engine over a boosted model with pipeline stages, whose micro-batches Colossal-AI's schedule runs."""

    def __init__(self, run: Run, plugin: Any, boosted: Any, optimizer: Any) -> None:
        self.run, self.plugin, self.boosted, self.wrapped = run, plugin, boosted, optimizer
        self.optimizer = HybridOptimizer(run, plugin, boosted, optimizer)
        self.streams = DropoutStreams(run, plugin, boosted)
        stages, chunks = plugin.pp_size, plugin.stage_manager.num_model_chunks
        self.theory = bubble_fraction(stages, chunks, run.batch.grad_accum_steps)
        self.clock = StageClock(run.world.device)
        time_schedule(plugin.scheduler, self.clock)
        # If upstream evaluates a batch whose size differs from the last one's, it sends shapes anew from then on. The first batch
        # always differs, because there is no last one. The interleaved schedule then forgets to send them, and hangs. All
        # batches here have one size, so set it before the first.
        plugin.scheduler.last_batch_size = run.batch.sequences_per_rank
        self.join(plugin.dp_group, None)

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        progress.at("forward")
        self.streams.start(batch.step, self.data_rank)
        self.boosted.train()
        n_targets = self.count_targets(batch)
        with self.clock.step():
            share = self._execute(batch, self.data_size / n_targets, self.wrapped) / self.data_size
        progress.at("optimizer")
        rank_losses = self.gather(share)()
        loss = rank_losses.sum()
        return StepResult(loss, self.optimizer_step(lr, loss), rank_losses)

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> Tensor:
        self.boosted.eval()
        schedule = self.plugin.scheduler
        # At the first transfer of a tensor, upstream records whether it needs a gradient. Here it needs none, and training must
        # not find that record.
        metadata = {name: getattr(schedule, name) for name in TRANSFER_METADATA}
        # Without no_sync upstream would sum gradients of the tied table, and there are none.
        with self.boosted.no_sync():
            loss = self._execute(batch, 1 / self.count_targets(batch), None)
        vars(schedule).update(metadata)
        dist.all_reduce(loss, group=self.group)
        return loss

    def _execute(self, batch: Batch, scale: Tensor | float, optimizer: Any) -> Tensor:
        """Run all micro-batches, and return the sum of their losses times `scale`, the same on every stage."""
        # Upstream divides each loss by the number of micro-batches.
        micro_batches = self.run.batch.grad_accum_steps

        def criterion(loss: Tensor, micro_batch: Any) -> Tensor:
            return loss * (scale * micro_batches)

        data = iter([{"input_ids": batch.inputs, "targets": batch.targets}])
        total = self.plugin.execute_pipeline(data, self.boosted, criterion, optimizer, return_loss=True)["loss"]
        total = torch.zeros((), device=batch.inputs.device) if total is None else total
        dist.all_reduce(total, group=self.plugin.pp_group)
        return total

    def bubble(self) -> Bubble:
        return self.clock.bubble(self.theory)


def time_schedule(schedule: Any, clock: StageClock) -> None:
    """Let `clock` time the computations of a OneForwardOneBackwardSchedule or InterleavedSchedule in training."""
    for kind, method in ((FORWARD, "forward_step"), (BACKWARD, "backward_step")):
        setattr(schedule, method, TimedMethod(schedule, clock, kind, getattr(schedule, method)))


class TimedMethod:
    """A method `compute` of a schedule, timed. The order of the calls tells the stage and the micro-batch of each."""

    def __init__(self, schedule: Any, clock: StageClock, kind: str, compute: Any) -> None:
        self.schedule, self.clock, self.kind, self.compute = schedule, clock, kind, compute
        # The model chunk of each call in this step.
        self.chunks: list[int] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the method and time it, unless the schedule only evaluates."""
        if self.schedule.forward_only:
            return self.compute(*arguments, **options)
        manager = self.schedule.stage_manager
        if len(self.chunks) == self._calls_per_step():
            self.chunks.clear()
        chunk = 0
        if manager.is_interleave:
            chunk = self.schedule.get_model_chunk_id(len(self.chunks), is_forward=self.kind == FORWARD)
        micro_batch = self.chunks.count(chunk)
        self.chunks.append(chunk)
        with self.clock.computing(self.kind, chunk * manager.num_stages + manager.stage, micro_batch):
            return self.compute(*arguments, **options)

    def _calls_per_step(self) -> int:
        manager = self.schedule.stage_manager
        micro_batches: int = self.schedule.num_microbatch if manager.is_interleave else self.schedule.num_microbatches
        return micro_batches * int(manager.num_model_chunks)
