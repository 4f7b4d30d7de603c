"""Weights & Biases: what Board writes for TensorBoard, by a package that need not be there."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.results.record.files import warn

OFF = ("offline", "disabled", "dryrun")  # words of WANDB_MODE that need no account


class WandbBoard:
    """Scalars for Weights & Biases, whose files lie in `folder`/wandb; `check_wandb` was called before.

    config: the run's options. start_step: as of Board; a run that resumes continues its own curves there, and what is logged
    again is dropped. WANDB_MODE=offline keeps everything on this machine, for `wandb sync` later.
    Raises ConfigError if it cannot start; what breaks later ends it with a warning, as with Board.
    """

    def __init__(self, folder: Path, start_step: int, config: Mapping[str, Any]) -> None:
        import wandb

        self._errors = (OSError, wandb.Error)
        noted = folder / "wandb_id"
        if not (start_step and noted.exists()):
            noted.write_text(uuid.uuid4().hex[:16])
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "gptscale"),
                name=folder.name,
                id=noted.read_text(),
                resume="allow",
                dir=str(folder),
                config={name: str(value) if isinstance(value, Path) else value for name, value in config.items()},
                settings=wandb.Settings(
                    console="off", silent=True, save_code=False
                ),  # the lines of a run are the run's
            )
        except wandb.Error as error:
            fix = "check the connection, or set WANDB_MODE=offline"
            raise ConfigError(f"Weights & Biases did not start ({error})", "in --wandb", fix) from None
        where = Path(self._run.dir).parent if self._run.offline else self._run.url
        print(f"Weights & Biases: {where}", flush=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values, by tag."""
        try:
            if self._run is not None:
                self._run.log(dict(values), step=step)
        except self._errors as error:
            self._give_up(error)

    def sync(self) -> None:
        """Nothing to do: a process of its own writes what it is given as it comes."""

    def close(self, failed: bool = False) -> None:
        """Wait until everything is written, or sent; `failed` is how the run is marked there."""
        try:
            if self._run is not None:
                self._run.finish(exit_code=int(failed))
        except self._errors as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        warn(f"Weights & Biases ends here ({error}), steps.csv goes on")


def check_wandb() -> None:
    """ConfigError if Weights & Biases is not installed, or would have to ask for an account."""
    try:
        import wandb
    except ImportError:
        wandb = None  # type: ignore[assignment]
    if not hasattr(wandb, "init"):  # a folder `wandb` where Python was started imports too
        fix = "pip install 'gptscale[wandb]'"
        raise ConfigError("Weights & Biases is not installed", "in --wandb", fix)
    if os.environ.get("WANDB_MODE") not in OFF and not wandb.login(prompt=False, verify=False):
        fix = "run `wandb login`, or set WANDB_MODE=offline"
        raise ConfigError("Weights & Biases knows no account here", "in --wandb", fix)
