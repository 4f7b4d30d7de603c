"""The options of a DeepSpeed recipe, and the checks before its run: operators compiled, user's JSON merged, room on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.user_file import Refuse, read_bytes, read_json

if TYPE_CHECKING:
    from gptscale.common.settings.run import Run

# Keys whose value the user may change: this package only sets a sensible default. Its other keys say what the run is.
USER_KEYS = {
    "buffer_size", "buffer_count", "reduce_bucket_size", "stage3_prefetch_bucket_size", "max_in_cpu", "pin_memory",
    "steps_per_print", "initial_scale_power", "loss_scale_window", "min_loss_scale", "grad_accum_dtype",
    "communication_data_type",
}  # fmt: skip
# Keys that the user may not set at all, with what sets them in a run.
RUN_KEYS = {
    "optimizer": "the run's --optimizer, --beta1, --beta2, --weight-decay make it",
    "scheduler": "--lr, --lr-schedule and --warmup-steps make it",
    "activation_checkpointing": "use --activation-checkpointing",
}

# DeepSpeed's own files have some kilobytes, and four levels.
FILE_BYTES_MAX, DEPTH_MAX = 2**20, 16


@dataclass(frozen=True)
class DeepSpeedConfig(RecipeConfig):
    """Base of the options of a recipe on DeepSpeed."""

    stage: int = 2
    """1 shards the optimizer, 2 gradients too, 3 weights too."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where the optimizer lives and steps, and at stage 3 the weights."""
    nvme_path: Path | None = None
    """For zero_infinity: a folder on a fast local disk. Default: the results folder."""
    ds_config: Path | None = None
    """A DeepSpeed JSON file whose keys replace the generated ones. Keys that contradict the run are refused."""

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ConfigError(f"stage {self.stage} is out of range", "in --stage", "use 1, 2 or 3")
        if self.offload == "nvme" and self.stage != 3:
            raise ConfigError(f"stage {self.stage} cannot offload to nvme", "in --stage", "use stage 3, or offload cpu")
        if self.nvme_path is not None and self.offload != "nvme":
            raise ConfigError("nvme_path is for a recipe that offloads to nvme only", "in --nvme-path", "leave it out")

    @property
    def ops(self) -> tuple[str, ...]:
        """Return the names of DeepSpeed's compiled operators that these options use."""
        return {"none": (), "cpu": ("cpu_adam",), "nvme": ("cpu_adam", "pin_memory", "async_io")}[self.offload]

    def state_formula(self, run: Run) -> str:
        """Return the bytes at the step, of which the fp32 ones are elsewhere under offload.

        With the optimizer on the host gradients are there twice: as they are summed, and as the optimizer reads them.
        """
        host = self.offload == "cpu"
        if self.stage == 3:
            return "(b + 12 + 4 + 4) N / d" if host else "(b + 12 + 4) N / d"
        # BF16_Optimizer sums whole gradients in fp32.
        if self.stage == 1 and run.config.precision == "bf16":
            return "b N + 12 N / d + (4 + b) N"
        return "b N + (12 + 4 + 4) N / d" if host and run.config.precision != "fp32" else "b N + (12 + 4) N / d"

    def json(self, run: Run) -> dict[str, Any]:
        raise NotImplementedError

    def contents(self) -> dict[str, str]:
        if self.ds_config is None:
            return {}
        content = read_bytes(self.ds_config, FILE_BYTES_MAX, _refuser(self.ds_config))
        return {"the content of --ds-config": hashlib.sha256(content).hexdigest()[:16]}

    def lacks(self) -> ConfigError | None:
        from gptscale.common.engines.zero import operators as deepspeed_ops

        return deepspeed_ops.lack(self.ops)

    def check(self, run: Run) -> None:
        """Raise ConfigError if the user's file contradicts the run, or the disk is too small for what would live on it."""
        from gptscale.common.engines.zero.swap_folder import check_space

        self.json(run)
        if self.offload == "nvme":
            # Per parameter: 16 bytes of fp32 weight, gradient and two moments, and the weight that is computed with.
            weight_bytes = 4 if run.config.precision == "fp32" else 2
            check_space(self.nvme_path, run.config.out, run.gpt.n_params_in_memory * (16 + weight_bytes), run.world)


def merged(generated: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Return the JSON `generated` with the user's JSON in `file` merged over it, if there is one.

    A value "auto", as Hugging Face writes it, means the value in `generated`. Raises ConfigError, naming each key whose value
    contradicts the run, or a key that only the run's own options may set.
    """
    if file is None:
        return generated
    where = f"in --ds-config {file}"
    user_json = read_json(file, FILE_BYTES_MAX, _refuser(file), deepest=DEPTH_MAX)
    if not isinstance(user_json, dict):
        raise ConfigError(f"holds a {type(user_json).__name__}, not an object", where, "give DeepSpeed's configuration")
    for key in RUN_KEYS.keys() & user_json.keys():
        raise ConfigError(f"{key} cannot be set there", where, f"leave it out: {RUN_KEYS[key]}")
    if contradictions := list(_contradictions(generated, user_json, ())):
        raise ConfigError("; ".join(contradictions), where, "leave it out, or change the run's options")
    return _over(generated, user_json)


def check_by_deepspeed(json: dict[str, Any], file: Path | None) -> None:
    """Raise ConfigError if DeepSpeed cannot use what the user's file made of its configuration."""
    if file is None:
        return
    from deepspeed.runtime.config import DeepSpeedConfig as DeepSpeedsOwn

    try:
        DeepSpeedsOwn(json)
    except Exception as error:
        # pydantic's errors, assertions, and whatever a value of another type leads to.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        fix = "correct it by DeepSpeed's documentation"
        raise ConfigError(f"DeepSpeed refuses it ({reason})", f"in --ds-config {file}", fix) from None


def _refuser(file: Path) -> Refuse:
    return lambda reason: ConfigError(reason, f"in --ds-config {file}", "give DeepSpeed's configuration")


def _contradictions(generated: dict[str, Any], user_json: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    for key, value in user_json.items():
        name, run_value = ".".join((*path, key)), generated.get(key)
        if key not in generated or value == "auto" or key in USER_KEYS:
            continue
        if isinstance(run_value, dict) and isinstance(value, dict):
            yield from _contradictions(run_value, value, (*path, key))
        elif value != run_value:
            yield f"{name} is {str(value)[:100]} there, {run_value} in this run"


def _over(generated: dict[str, Any], user_json: dict[str, Any]) -> dict[str, Any]:
    result = dict(generated)
    for key, value in user_json.items():
        if isinstance(value, dict):
            run_value = generated.get(key)
            result[key] = _over(run_value if isinstance(run_value, dict) else {}, value)
        elif value != "auto":
            result[key] = value
    return result
