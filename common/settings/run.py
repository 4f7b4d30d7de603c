"""A resolved run, as `build` of every recipe receives it: its options, model, batch arithmetic and place in the world."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gptscale.common.settings.batch_plan import BatchPlan
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.learning_rate import learning_rate
from gptscale.common.settings.run_config import MOMENT_BYTES, RunConfig

if TYPE_CHECKING:
    # torch is not imported before the options are parsed.
    from gptscale.common.process.world import World


@dataclass(frozen=True)
class Run:
    """Everything that is fixed before the first process group exists."""

    recipe: str
    config: RunConfig
    gpt: GPTConfig
    batch: BatchPlan
    world: World

    @property
    def seq_len(self) -> int:
        return self.config.tokens_per_sequence

    @property
    def tp_size(self) -> int:
        return self.config.tp_size or 1

    @property
    def pp_size(self) -> int:
        return self.config.pp_size or 1

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch_size * self.seq_len

    @property
    def state_bytes(self) -> float:
        """Return the bytes of weights and gradients, 4 per parameter each, and of the optimizer's moments, before any split."""
        moments = MOMENT_BYTES[self.config.optimizer_state] if self.config.optimizer == "adamw" else 0.0
        return (8 + moments) * self.gpt.n_params

    def lr_at(self, step: int) -> float:
        """Return the learning rate of 0-based `step`."""
        c = self.config
        return learning_rate(
            step,
            peak=c.peak_lr,
            total_steps=c.steps,
            warmup_steps=c.warmup_steps,
            schedule=c.lr_schedule,
            min_ratio=c.min_lr_ratio,
        )


def workload(run: Run, data_fingerprint: str) -> dict[str, Any]:
    """Return what two runs must share for their speed and loss to be comparable.

    Everything else is a matter of the strategy.
    """
    c, gpt = run.config, run.gpt
    return {
        "model": c.model,
        "n_layer": gpt.n_layer,
        "n_head": gpt.n_head,
        "n_embd": gpt.n_embd,
        "vocab_size": gpt.vocab_size,
        "activation": gpt.activation,
        "dropout": gpt.dropout,
        "seq_len": run.seq_len,
        "global_batch_size": run.batch.global_batch_size,
        "steps": c.steps,
        "precision": c.precision,
        "clip_grad_norm": c.clip_grad_norm,
        "optimizer": c.optimizer,
        "optimizer_state_precision": c.optimizer_state,
        "lr": c.peak_lr,
        "lr_schedule": c.lr_schedule,
        "warmup_steps": c.warmup_steps,
        "min_lr_ratio": c.min_lr_ratio,
        "weight_decay": c.weight_decay,
        "betas": [c.beta1, c.beta2],
        # A path does not tell the data, the fingerprint of its content does.
        "data": c.data if c.data in ("synthetic", "stdlib") else "content",
        "data_fingerprint": data_fingerprint,
        "seed": c.seed,
    }


def changed_work(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a line for each part of a saved run's work that is another in the run that resumes it."""
    return [f"{name} was {saved[name]}, is {now}" for name, now in current.items() if saved.get(name, now) != now]


def workload_hash(work: dict[str, Any]) -> str:
    """Return 16 hex digits of the SHA-256 of a workload."""
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:16]
