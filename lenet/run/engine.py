"""A vision model with its optimizer on one rank: a training step, an evaluation, and the state that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gptscale.common.process.world import World
from gptscale.common.state import Shard, shard_of
from gptscale.lenet.models.batch_norm import synced
from gptscale.lenet.models.registry import ImageShape, build_model
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.optimizer import make_optimizer, make_scaler
from gptscale.lenet.run.strategy import make_fabric, strategy_of

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Score:
    """What an evaluation found. loss: mean cross entropy. correct, total: per class."""

    loss: float
    correct: tuple[int, ...]
    total: tuple[int, ...]

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / sum(self.total)

    @property
    def class_accuracy(self) -> list[float | None]:
        """None for a class without test images."""
        return [c / t if t else None for c, t in zip(self.correct, self.total, strict=True)]


class VisionEngine:
    """Trains one model; with several ranks by DistributedDataParallel. The process group runs already, if there is one."""

    def __init__(self, config: VisionConfig, shape: ImageShape, world: World) -> None:
        self.config, self.world, self.n_classes = config, world, shape.n_classes
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
        model = build_model(
            config.model, shape, gelu=config.gelu, custom=config.operators == "custom", seed=config.seed
        )
        dtype = torch.float32 if config.amp else DTYPES[config.precision]
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        self.module = model.to(world.device, dtype, memory_format=layout)  # type: ignore[call-overload]
        if config.batch_norm == "sync" and world.world_size > 1:
            self.module = synced(self.module)
        self.has_dropout = any(isinstance(m, nn.Dropout) for m in model.modules())
        self.optimizer = make_optimizer(config, self.module)
        self.model: nn.Module = self.module
        self.backward: Callable[[Tensor], Any] = Tensor.backward
        # Buffers are averaged before they are used, in `settle`; sending them with every forward would be for nothing.
        strategy = strategy_of(config, world)
        if strategy == "ddp":
            self.model = DistributedDataParallel(self.module, broadcast_buffers=False)
        elif strategy == "dataparallel":
            self.model = nn.DataParallel(self.module)
        elif strategy == "fabric":
            fabric = make_fabric(world)
            self.model = fabric.setup_module(self.module)
            self.backward = fabric.backward
        self.scaler, self.fixed_scale = make_scaler(config, world.device)
        # Whether the last step overflowed and was left out, 0 or 1 as (); None without a loss scale.
        self.skipped: Tensor | None = None
        if self.scaler.is_enabled():
            self.optimizer.register_step_pre_hook(self._note_overflow)

    def _autocast(self) -> AbstractContextManager[None]:
        if self.config.precision in ("fp32", "tf32") or not self.config.amp:
            return nullcontext()
        return torch.autocast(self.world.device.type, DTYPES[self.config.precision])  # type: ignore[return-value]

    def train_step(self, step: int, images: Tensor, labels: Tensor, lr: float) -> Tensor:
        """One optimizer step, 0-based `step` of the run; this rank's mean loss, detached, ()."""
        if self.has_dropout:  # so that a step draws the same whenever it is reached, and each rank its own
            torch.manual_seed((self.config.seed * 1_000_003 + step) * 1009 + self.world.rank)
        self.model.train()
        with self._autocast():
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=self.config.label_smoothing)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.backward(self.scaler.scale(loss))
        self.scaler.step(self.optimizer)
        self.scaler.update(self.fixed_scale)
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _note_overflow(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # GradScaler tells a fused optimizer so, and it leaves weights and state as they are; every rank has the same gradients.
        self.skipped = optimizer.found_inf  # type: ignore[attr-defined]

    @torch.no_grad()
    def settle(self) -> None:
        """Give all ranks the mean of their batch norms' running statistics; nothing to do alone or with synced ones."""
        if self.world.world_size == 1:
            return
        for name, buffer in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(buffer)
                buffer /= self.world.world_size

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Score:
        """Loss and per-class hits over all ranks' `batches`, each image counted once."""
        self.model.eval()
        device = self.world.device
        hits, totals = (torch.zeros(self.n_classes, dtype=torch.int64, device=device) for _ in range(2))
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for images, labels in batches:
            with self._autocast():
                logits = self.module(images).float()
            loss += F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.bincount(labels, minlength=self.n_classes)
            hits += torch.bincount(labels[logits.argmax(1) == labels], minlength=self.n_classes)
        if self.world.world_size > 1:
            for sums in (hits, totals, loss):
                dist.all_reduce(sums)
        return Score(loss.item() / int(totals.sum()), tuple(hits.tolist()), tuple(totals.tolist()))

    def state(self) -> Iterator[Shard]:
        """Weights, buffers, then the optimizer's tensors, as named boxes; every rank holds all of them."""
        for name, tensor in self.module.state_dict().items():
            yield shard_of(f"model/{name}", tensor)
        for name, p in self.module.named_parameters():
            for key, tensor in self.optimizer.state[p].items():
                yield shard_of(f"optimizer.{key}/{name}", tensor)

    def counters(self) -> dict[str, float]:
        """The state of fp16's loss scale, if there is one."""
        return {k: float(v) for k, v in self.scaler.state_dict().items()} if self.scaler.is_enabled() else {}

    def load_counters(self, counters: dict[str, float]) -> None:
        """Restore `counters()`."""
        if self.scaler.is_enabled():
            whole = {"growth_interval", "_growth_tracker"}
            self.scaler.load_state_dict({k: int(v) if k in whole else v for k, v in counters.items()})
