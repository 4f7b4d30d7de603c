"""Weights & Biases: the scalars that Board writes for TensorBoard, by a package that need not be installed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.results.record.files import replace_file, warn

# Words of WANDB_MODE that need no account.
OFF = ("offline", "disabled", "dryrun")


class WandbBoard:
    """Scalars for Weights & Biases, whose files lie in `folder`/wandb.

    Call `check_wandb` before. config: the run's options. start_step: as of Board. A run that resumes continues its own curves
    there, and steps that are logged again are dropped. WANDB_MODE=offline keeps everything on this machine, for `wandb sync`
    later. Raises ConfigError if it cannot start. What breaks later ends it with a warning, as with Board.
    """

    def __init__(self, folder: Path, start_step: int, config: Mapping[str, Any]) -> None:
        import wandb

        self._errors = (OSError, wandb.Error)
        id_file = folder / "wandb_id"
        if not (start_step and id_file.exists()):
            replace_file(id_file, uuid.uuid4().hex[:16].encode())
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "gptscale"),
                name=folder.name,
                id=id_file.read_text(),
                resume="allow",
                dir=str(folder),
                config={name: str(value) if isinstance(value, Path) else value for name, value in config.items()},
                # A run's output is its own, and is not sent.
                settings=wandb.Settings(console="off", silent=True, save_code=False),
            )
        except wandb.Error as error:
            fix = "check the connection, or set WANDB_MODE=offline"
            raise ConfigError(f"Weights & Biases did not start ({error})", "in --wandb", fix) from None
        where = Path(self._run.dir).parent if self._run.offline else self._run.url
        print(f"Weights & Biases: {where}", flush=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        try:
            if self._run is not None:
                self._run.log(dict(values), step=step)
        except self._errors as error:
            self._give_up(error)

    def close(self, failed: bool = False) -> None:
        """Wait until everything is written or sent, and mark the run there as failed or finished."""
        try:
            if self._run is not None:
                self._run.finish(exit_code=int(failed))
        except self._errors as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        warn(f"Weights & Biases ends here ({error}), steps.csv goes on")


def check_wandb() -> None:
    """Raise ConfigError if Weights & Biases is not installed, or would have to ask for an account."""
    try:
        import wandb
    except ImportError:
        wandb = None  # type: ignore[assignment]
    # A folder `wandb` where Python was started can be imported too.
    if not hasattr(wandb, "init"):
        fix = "pip install 'gptscale[wandb]'"
        raise ConfigError("Weights & Biases is not installed", "in --wandb", fix)
    if os.environ.get("WANDB_MODE") not in OFF and not wandb.login(prompt=False, verify=False):
        fix = "run `wandb login`, or set WANDB_MODE=offline"
        raise ConfigError("Weights & Biases knows no account here", "in --wandb", fix)
