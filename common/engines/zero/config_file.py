"""A DeepSpeed JSON of the user's, merged over the one this package writes; what would contradict the run is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError

# Keys that we set for a sensible start only: the user's value wins. Every other key that we set says what the run is.
FREE = {
    "buffer_size", "buffer_count", "reduce_bucket_size", "max_in_cpu", "pin_memory", "steps_per_print", "initial_scale_power",
    "loss_scale_window", "min_loss_scale", "grad_accum_dtype", "communication_data_type",
}  # fmt: skip
OURS_ALONE = {
    "optimizer": "the run's --optimizer, --beta1, --beta2, --weight-decay make it",
    "scheduler": "--lr, --lr-schedule and --warmup-steps make it",
    "activation_checkpointing": "use --activation-checkpointing",
}


def merged(ours: dict[str, Any], file: Path) -> dict[str, Any]:
    """`ours` with the keys of `file` over it; "auto" (as Hugging Face writes) means ours.

    Raises ConfigError naming each key whose value is another in the run, or that the run makes itself.
    """
    where = f"in --ds-config {file}"
    try:
        theirs = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"not a JSON file ({error})", where, "give DeepSpeed's configuration") from None
    if not isinstance(theirs, dict):
        raise ConfigError(f"holds a {type(theirs).__name__}, not an object", where, "give DeepSpeed's configuration")
    for key in OURS_ALONE.keys() & theirs.keys():
        raise ConfigError(f"{key} cannot be set there", where, f"leave it out: {OURS_ALONE[key]}")
    if contradictions := list(_contradictions(ours, theirs, ())):
        raise ConfigError("; ".join(contradictions), where, "leave it out, or change the run's options")
    return _over(ours, theirs)


def _contradictions(ours: dict[str, Any], theirs: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    for key, value in theirs.items():
        name, mine = ".".join((*path, key)), ours.get(key)
        if key not in ours or value == "auto" or key in FREE:
            continue
        if isinstance(mine, dict) and isinstance(value, dict):
            yield from _contradictions(mine, value, (*path, key))
        elif value != mine:
            yield f"{name} is {value} there, {mine} in this run"


def _over(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    result = dict(ours)
    for key, value in theirs.items():
        if isinstance(value, dict):
            result[key] = _over(ours.get(key, {}), value)
        elif value != "auto":
            result[key] = value
    return result
