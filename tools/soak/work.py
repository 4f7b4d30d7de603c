"""The small run that a soak breaks, and the program that starts it."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.process.program import Program
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.run.options import default_recipe_config, option_words
from gptscale.launchers.run.start import plan_run
from gptscale.recipes import WORKER_IMPORTS, get
from gptscale.recipes.handout import OWN

STEPS, SAVE_EVERY, EVAL_EVERY = 96, 4, 3
# In the runs in which a rank is frozen; all others have a run's default.
SHORT_TIMEOUT_S = 5.0
RUN_NAME = "run"
# Options that a run has or has not, drawn for each.
VARIED: dict[str, Any] = {
    "save_async": True,
    "log_every": 4,
    "grad_accum_steps": 2,
    "precision": "bf16",
    "optimizer_state": "8bit",
    "activation_checkpointing": "full",
    "on_spike": "skip",
}


@dataclass(frozen=True)
class SoakWork:
    """What one recipe trains, whether it is broken or not. varied: the options of VARIED that it has."""

    recipe: str
    nproc: int
    seed: int
    varied: tuple[str, ...] = ()

    def with_options(self, index: int, out: Path) -> SoakWork:
        """Return the work of run number `index`, whose options its number and the seed draw from those the recipe takes."""
        random = Random(f"{self.seed} {self.recipe} {index} options")
        work = self
        for name in (name for name in VARIED if random.random() < 0.5):
            wider = dataclasses.replace(work, varied=(*work.varied, name))
            # The recipe refuses the option, or refuses it beside those drawn before.
            with contextlib.suppress(ConfigError):
                wider.check(out)
                work = wider
        return work

    def config(self, out: Path, *, short_timeout: bool = False) -> RunConfig:
        """Return the run's options. Dropout is on, so that a random state that is not restored shows."""
        config = RunConfig(
            n_layer=2,
            n_embd=32,
            n_head=4,
            seq_len=16,
            dropout=0.1,
            data="synthetic",
            seed=self.seed,
            global_batch_size=4,
            steps=STEPS,
            save_every=SAVE_EVERY,
            eval_every=EVAL_EVERY,
            eval_batches=1,
            device="cpu",
            tensorboard=False,
            dist_timeout_s=SHORT_TIMEOUT_S if short_timeout else None,
            resume="auto",
            out=out,
            run_name=RUN_NAME,
            **{name: VARIED[name] for name in self.varied},
        )
        if get(self.recipe).own_work:
            # Data and dropout are the recipe's own, and it evaluates nothing.
            return dataclasses.replace(config, **{name: getattr(RunConfig, name) for name in OWN})
        return config

    def own(self) -> Any:
        """Return the recipe's own options. A ring has no dropout, so that sequences are cut by heads."""
        own: Any = default_recipe_config(self.recipe)
        return dataclasses.replace(own, cp_style="ulysses") if self.recipe == "context_parallel" else own

    def check(self, out: Path) -> None:
        """Raise ConfigError if the run cannot start here."""
        config = dataclasses.replace(self.config(out), resume=None)
        plan_run(self.recipe, config, self.own(), self.nproc)

    def program(self, out: Path, *, short_timeout: bool = False) -> Program:
        """Return the command that begins the run, or goes on from the newest checkpoint if there is one."""
        row = get(self.recipe)
        words = option_words(self.recipe, self.config(out, short_timeout=short_timeout), self.own())
        # The launcher forks the ranks from itself, so it begins with what they import.
        imports = ("gptscale.launchers.run.start", *(WORKER_IMPORTS if row.environment else row.imports))
        return Program(
            "gptscale.launchers.cli", ("run", self.recipe, "--nproc", str(self.nproc), *words), imports=imports
        )
