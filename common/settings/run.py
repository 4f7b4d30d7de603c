"""A resolved run, as `build` of every recipe receives it: its options, model, batch arithmetic and place in the world."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from gptscale.common.settings.batch_plan import BatchPlan
from gptscale.common.settings.learning_rate import learning_rate
from gptscale.common.settings.mesh import AXES, Mesh
from gptscale.common.settings.optimizers import OPTIMIZERS
from gptscale.common.settings.run_config import NOT_WORK, SHAPE, RunConfig
from gptscale.common.settings.shape import ModelConfig

if TYPE_CHECKING:
    # torch is not imported before the options are parsed.
    from gptscale.common.process.world import World


@dataclass(frozen=True)
class Run:
    """Everything that is fixed before the first process group exists. axes: of its mesh, the outermost first."""

    recipe: str
    config: RunConfig
    gpt: ModelConfig
    batch: BatchPlan
    world: World
    axes: tuple[str, ...] = AXES

    @property
    def mesh(self) -> Mesh:
        sizes = {"dp": self.batch.dp_size, "cp": self.cp_size, "tp": self.tp_size, "pp": self.pp_size}
        return Mesh({axis: sizes[axis] for axis in self.axes})

    @property
    def seq_len(self) -> int:
        return self.config.seq_len or self.gpt.block_size

    @property
    def tp_size(self) -> int:
        return self.config.tp_size or 1

    @property
    def cp_size(self) -> int:
        return self.config.cp_size or 1

    @property
    def pp_size(self) -> int:
        return self.config.pp_size or 1

    @property
    def split_size(self) -> int:
        """Return the ranks among which the batch and its sequences are split."""
        return self.batch.dp_size * self.cp_size

    @property
    def split_place(self) -> int:
        """Return which of these ranks this one is."""
        mesh, rank = self.mesh, self.world.rank
        return mesh.place("dp", rank) * mesh.size("cp") + mesh.place("cp", rank)

    @property
    def rank_seq_len(self) -> int:
        """Return the tokens of each sequence that a rank has."""
        return self.seq_len // self.cp_size

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch_size * self.seq_len

    @property
    def state_bytes(self) -> float:
        """Return the bytes of weights and gradients, 4 per parameter each, and of the optimizer's state, before any split."""
        return 8 * self.gpt.n_params + self.optimizer_bytes(self.gpt.n_params, self.config.optimizer_state)

    def optimizer_bytes(self, n: int, form: str) -> float:
        """Return the bytes of the optimizer's state in precision `form` for `n` parameters, matrices of blocks among them."""
        row, matrices = OPTIMIZERS[self.config.optimizer], self.gpt.n_layer * sum(self.gpt.block_matrices)
        of_matrix = 4.0 * len(row.matrix_keys) or row.state_bytes[form]
        return row.state_bytes[form] * (n - matrices) + of_matrix * matrices

    def lr_at(self, step: int) -> float:
        c = self.config
        return learning_rate(
            step,
            peak=c.peak_lr,
            total_steps=c.steps,
            warmup_steps=c.warmup_steps,
            schedule=c.lr_schedule,
            min_ratio=c.min_lr_ratio,
            decay_from=c.decay_from,
        )


def workload(run: Run, data_fingerprint: str) -> dict[str, Any]:
    """Return what two runs must share for their speed and loss to be comparable: all options but those of NOT_WORK.

    Everything else is a matter of the strategy.
    """
    c, gpt = run.config, run.gpt
    of_model = {name: getattr(gpt, name) for name in SHAPE}
    work = _options_of_work(vars(c)) | of_model
    return work | {
        # The path of one's own model is not compared, but what it holds.
        "model": gpt.identity or c.model,
        "seq_len": run.seq_len,
        "global_batch_size": run.batch.global_batch_size,
        "lr": c.peak_lr,
        # A path does not tell the data, the fingerprint of its content does.
        "data": c.data if c.data in ("synthetic", "stdlib") else "content",
        "data_fingerprint": data_fingerprint,
    }


def todays_workload(recorded: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workload that any version recorded as today's version would, so that their hashes compare.

    options: the run's, as its run.json has them. One that they lack had its default before it became an option.
    """
    return _options_of_work({f.name: f.default for f in fields(RunConfig)} | dict(options)) | _todays_names(recorded)


def _options_of_work(options: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: options[f.name] for f in fields(RunConfig) if f.name not in NOT_WORK}


def _todays_names(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded workload by the names of the options, which two parts did not have until 0.3.0."""
    work = dict(recorded)
    if "betas" in work:
        work["beta1"], work["beta2"] = work.pop("betas")
        work["optimizer_state"] = work.pop("optimizer_state_precision")
    return work


def changed_work(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a line for each part of a saved run's work that is another in the run that resumes it."""
    saved = _todays_names(saved)
    return [f"{name} was {saved[name]}, is {now}" for name, now in current.items() if saved.get(name, now) != now]


def workload_hash(work: dict[str, Any]) -> str:
    """Return 16 hex digits of the SHA-256 of a workload."""
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:16]
