"""What the launcher asks of a DeepSpeed recipe's options before a run: operators compiled, a file merged, room on a disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gptscale.common.engines.zero import operators as deepspeed_ops
from gptscale.common.engines.zero.config_file import merged
from gptscale.common.engines.zero.swap_folder import check_space
from gptscale.common.errors import ConfigError
from gptscale.common.settings.run_config import RecipeConfig

if TYPE_CHECKING:
    from gptscale.common.engine import Engine
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class DeepSpeedConfig(RecipeConfig):
    """Base of the options of a recipe on DeepSpeed."""

    stage: int = 2
    """1 shards the optimizer, 2 gradients too, 3 weights too."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where the optimizer lives and steps, and at stage 3 the weights."""
    nvme_path: Path | None = None
    """zero_infinity: folder on a fast local disk; default the results folder."""
    ds_config: Path | None = None
    """A DeepSpeed JSON of your own, merged over ours; what contradicts the run is refused."""

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ConfigError(f"stage {self.stage} is out of range", "in --stage", "use 1, 2 or 3")
        if self.offload == "nvme" and self.stage != 3:
            raise ConfigError(f"stage {self.stage} cannot offload to nvme", "in --stage", "use stage 3, or offload cpu")
        if self.nvme_path is not None and self.offload != "nvme":
            raise ConfigError("nvme_path is for recipe zero_infinity only", "in --nvme-path", "leave it out")

    @property
    def ops(self) -> tuple[str, ...]:
        """DeepSpeed's compiled operators that these options use."""
        return {"none": (), "cpu": ("cpu_adam",), "nvme": ("cpu_adam", "pin_memory", "async_io")}[self.offload]

    def over(self, json: dict[str, Any]) -> dict[str, Any]:
        """`json` with the user's own file merged over it."""
        return merged(json, self.ds_config) if self.ds_config else json

    def json(self, run: Run) -> dict[str, Any]:
        """DeepSpeed's JSON for `run`."""
        raise NotImplementedError

    def lacks(self) -> ConfigError | None:
        """Operators that are not compiled."""
        return deepspeed_ops.lack(self.ops)

    def check(self, run: Run) -> None:
        """ConfigError if the user's file contradicts the run, or the disk is too small for what would live on it."""
        self.json(run)
        if self.offload == "nvme":
            weight_bytes = 4 if run.config.precision == "fp32" else 2
            check_space(self.nvme_path, run.config.out, run.gpt.n_params_in_memory * (16 + weight_bytes), run.world)

    def load_own(self, engine: Engine, folder: Path) -> int:
        """What DeepSpeed's save_checkpoint left."""
        from gptscale.common.engines.zero.optimizer import load_own

        return load_own(engine, folder)
