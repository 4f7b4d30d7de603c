"""A vision model with its optimizer on one rank: training steps, evaluation, and the state that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gptscale.common.engine import Batch, Engine, StepResult
from gptscale.common.engines.torch_engine import tell_backward
from gptscale.common.model.precision import DTYPES, LossScale, autocast
from gptscale.common.process.progress import progress
from gptscale.common.process.world import World
from gptscale.common.state import Shard, shard_of
from gptscale.lenet.models import ImageShape
from gptscale.lenet.models.batch_norm import synced
from gptscale.lenet.models.registry import build_model
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.strategy import distribute


def weight_dtype(config: VisionConfig) -> torch.dtype:
    """Return the type of weights and images: that of the precision without autocast, fp32 with it."""
    return torch.float32 if config.amp or config.precision == "tf32" else DTYPES[config.precision]


def memory_format(config: VisionConfig) -> torch.memory_format:
    """Return the layout of weights and images."""
    return torch.channels_last if config.channels_last else torch.contiguous_format


@dataclass(frozen=True)
class Score:
    """The result of an evaluation.

    loss: mean cross entropy, in nats. correct, total: numbers of images of each class. class_accuracy: fractions with blanks
    between, as lenet.csv has them, - for a class without test images.
    """

    loss: float
    correct: tuple[int, ...]
    total: tuple[int, ...]

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / sum(self.total)

    @property
    def class_accuracy(self) -> str:
        return " ".join(f"{c / t:.4f}" if t else "-" for c, t in zip(self.correct, self.total, strict=True))


class VisionEngine(Engine):
    """One vision model in training on one rank, under the run's strategy.

    The process group is running already if the strategy needs one. The loss of a step is this rank's: ranks add theirs up only
    when the recorder reads a window of steps. Gradient norms are not computed, they are NaN.
    """

    def __init__(self, config: VisionConfig, shape: ImageShape, world: World) -> None:
        self.config, self.world, self.n_classes = config, world, shape.n_classes
        self.data_rank, self.data_size = world.rank, world.world_size
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
        custom = config.operators == "custom"
        model = build_model(config.model, shape, gelu=config.gelu, custom=custom, seed=config.seed)
        self.module = model.to(world.device, weight_dtype(config), memory_format=memory_format(config))  # type: ignore[call-overload]
        if config.batch_norm == "sync" and world.world_size > 1:
            self.module = synced(self.module)
        self.has_dropout = any(isinstance(m, nn.Dropout) for m in model.modules())
        self.optimizer = make_optimizer(config, self.module)
        self.model, self.backward = distribute(self.module, config, world)
        self.scaler, self.fixed_scale = make_scaler(config, world.device)
        # A scalar tensor, 1 if the last step overflowed and was left out, else 0. None without a loss scale.
        self.skipped: Tensor | None = None
        self.no_norm = torch.tensor(float("nan"), device=world.device)
        if self.scaler.is_enabled():
            self.optimizer.register_step_pre_hook(self._note_overflow)

    def _autocast(self) -> AbstractContextManager[None]:
        c = self.config
        return autocast(c.precision if c.amp and c.precision != "tf32" else "fp32", self.world.device)

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        self.set_rate(lr)
        loss = self.loss(batch)
        self.backward(tell_backward(self.scaler.scale(loss)))
        progress.at("optimizer")
        self.scaler.step(self.optimizer)
        self.scaler.update(self.fixed_scale)
        self.optimizer.zero_grad(set_to_none=True)
        return self.result(loss)

    def result(self, loss: Tensor) -> StepResult:
        own = loss.detach()
        return StepResult(own, self.no_norm, own.view(1), self.skipped)

    def loss(self, batch: Batch) -> Tensor:
        """Return this rank's mean loss, with what backward needs."""
        # A step draws the same dropout whenever it is reached, and each rank draws its own.
        if self.has_dropout:
            torch.manual_seed((self.config.seed * 1_000_003 + batch.step) * 1009 + self.world.rank)
        progress.at("forward")
        self.model.train()
        with self._autocast():
            logits = self.model(batch.inputs)
        return F.cross_entropy(logits.float(), batch.targets, label_smoothing=self.config.label_smoothing)

    def eval_loss(self, batch: Batch) -> Tensor:
        return torch.tensor(self.evaluate([(batch.inputs, batch.targets)]).loss)

    def set_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _note_overflow(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # GradScaler tells a fused optimizer about an overflow, and the optimizer then changes neither weights nor state. All
        # ranks agree, because they have the same gradients.
        self.skipped = optimizer.found_inf  # type: ignore[attr-defined]

    @torch.no_grad()
    def settle(self) -> None:
        """Give all ranks the mean of their batch norms' running statistics.

        This changes nothing with one process, or with batch norms that are synchronised in every step.
        """
        if self.world.world_size == 1:
            return
        for name, buffer in self.module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(buffer)
                buffer /= self.world.world_size

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Score:
        """Return the loss and the hits of each class over the batches of all ranks."""
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
        """Yield weights, buffers, then the optimizer's tensors as named shards, of which every rank holds all."""
        for name, tensor in self.module.state_dict().items():
            yield shard_of(f"model/{name}", tensor)
        for name, p in self.module.named_parameters():
            for key, tensor in self.optimizer.state[p].items():
                yield shard_of(f"optimizer.{key}/{name}", tensor)

    def counters(self) -> dict[str, float]:
        """Return the state of fp16's loss scale, or nothing where there is none."""
        return {k: float(v) for k, v in self.scaler.state_dict().items()} if self.scaler.is_enabled() else {}

    def load_counters(self, counters: dict[str, float]) -> None:
        if self.scaler.is_enabled():
            integers = {"growth_interval", "_growth_tracker"}
            self.scaler.load_state_dict({k: int(v) if k in integers else v for k, v in counters.items()})


class HalfSGD(torch.optim.SGD):
    """SGD for weights in bf16 or fp16 on a CPU, with each step in fp32 and one rounding of weights and momentum.

    torch's fused SGD leaves such weights unchanged, all but a few at the end of each tensor (with torch 2.11,
    github.com/pytorch/pytorch/issues/191763). Like a fused optimizer, it gets the loss scale and the overflow from GradScaler.
    """

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step, or none if gradients overflowed. `closure` computes the gradients, where it is given."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        if bool(getattr(self, "found_inf", False)):
            return
        scale = getattr(self, "grad_scale", 1.0)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                change = p.grad.float() / scale + group["weight_decay"] * p.float()
                if group["momentum"]:
                    momentum = self.state[p]["momentum_buffer"]
                    change += group["momentum"] * momentum.float()
                    momentum.copy_(change)
                p.copy_(p.float() - group["lr"] * change)


def make_optimizer(config: VisionConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer with its state allocated, into which a checkpoint can be loaded before the first step."""
    parameters = list(model.parameters())
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        if parameters[0].device.type == "cpu" and parameters[0].dtype != torch.float32:
            optimizer: torch.optim.Optimizer = HalfSGD(parameters, momentum=config.momentum, **common)
        else:
            optimizer = torch.optim.SGD(parameters, momentum=config.momentum, fused=True, **common)
        for p in parameters if config.momentum else []:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return optimizer
    adam_class = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    optimizer = adam_class(parameters, fused=True, **common)
    for p in parameters:
        optimizer.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][key] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return optimizer


def make_scaler(config: VisionConfig, device: torch.device) -> tuple[torch.amp.GradScaler, float | None]:
    """Return the scaler of fp16's loss and the number at which its scale is fixed, None for a dynamic scale.

    The scaler is switched off for precisions without a loss scale. A step whose gradients overflow is skipped with a fixed and
    with a dynamic scale, but only the dynamic scale is halved then.
    """
    scale = config.resolved_loss_scale
    enabled = scale not in (None, "none")
    fixed = float(scale) if enabled and scale != "dynamic" else None  # type: ignore[arg-type]
    return torch.amp.GradScaler(device.type, init_scale=fixed or LossScale.START, enabled=enabled), fixed
