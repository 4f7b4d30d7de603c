"""Read the steps that another program left: a CSV, a log of torchtitan, or a folder of Weights & Biases."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError, visible
from gptscale.common.settings.checks import did_you_mean
from gptscale.common.settings.user_file import read_bytes, read_rows, read_text

# A figure of a step, and the names that it may have there, of which the first that is there is read.
NAMES = {
    "step": "step train/global_step _step",
    "loss": "loss train_loss train/loss train_loss_step loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm train/grad_norm",
    "lr": "lr train/lr train/learning_rate",
    "step_time_s": "step_time_s",
    "tokens_per_s": "tokens_per_s train/tokens_per_s",
    "tokens_per_s_per_device": "tokens_per_s_per_device tps throughput(tps)",
    # A clock that goes on. Only --map names it, because it does not stop while a program saves or evaluates.
    "elapsed_s": "",
}
BYTES_MAX, FIGURE_MAX = 2**28, 1e18
COLOUR, TITAN_LINE = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r" - INFO - (step: .*)")
TITAN_FIGURE = re.compile(r"(\w+): +([^\s(%]+)")
# The log of Weights & Biases has LevelDB's form: blocks, in which each part of a record has a check sum, a length and a kind.
WANDB_START, BLOCK, PART = b":W&B", 2**15, struct.Struct("<IHB")
Lines = list[dict[str, str]]


def refuse(reason: str) -> ConfigError:
    """Return the error for what cannot be imported."""
    return ConfigError(reason, "in import", "give what the program wrote (docs/guides/import.md)")


def read_foreign(kind: str, path: Path) -> tuple[Lines, dict[str, str], str]:
    """Return the cells of each line, the options that the program recorded, and how it failed, empty if it did not."""
    if kind == "wandb":
        return _wandb(path)
    if kind != "torchtitan":
        return read_rows(path, BYTES_MAX, refuse), {}, ""
    text = COLOUR.sub("", read_text(path, BYTES_MAX, refuse))
    # Thousands have commas there.
    return [dict(TITAN_FIGURE.findall(line.replace(",", ""))) for line in TITAN_LINE.findall(text)], {}, ""


def foreign_steps(lines: Lines, given: Mapping[str, str], first: int) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Return the figures of each training step in their order, and the name that each figure has there.

    given: names that the user gave. first: the number that the program gives to its first step.
    A line without step or loss is left out, as those of an evaluation are. Of two lines of one step the last counts.
    """
    present = {name for line in lines for name in line}
    # The first name that is there wins, so that it comes last.
    used = {figure: name for figure, names in NAMES.items() for name in names.split()[::-1] if name in present}
    for figure, name in ({"step": "step", "loss": "loss"} | used | {**given}).items():
        if name not in present:
            fix = f"give {figure}=NAME, {did_you_mean(name, sorted(present))}" if present else "give another file"
            raise ConfigError(f"there is no {name!r}", "in --map" if figure in given else "in import", fix)
        used[figure] = name
    steps: dict[float, dict[str, float]] = {}
    for line in lines:
        figures = {figure: _figure(figure, line[name]) for figure, name in used.items() if line.get(name)}
        if {"step", "loss"} <= figures.keys():
            figures["step"] += 1 - first
            steps[figures["step"]] = figures
    if not steps:
        raise refuse("no line has a step and a loss")
    if (step := min(steps)) < 1:
        what = f"there is a step {step - 1 + first:g}"
        raise ConfigError(what, "in --first-step", "give the number of its first step")
    return [steps[step] for step in sorted(steps)], used


def _figure(figure: str, text: str) -> float:
    try:
        value = float(text)
        # A run may end in a loss that is NaN, and in fp16 a norm may be infinite.
        if figure in ("loss", "grad_norm") or (0 <= value <= FIGURE_MAX and (figure != "step" or value % 1 == 0)):
            return value
    except ValueError:
        pass
    raise refuse(f"{figure} {visible(text[:40])!r} is no figure")


def _wandb(folder: Path) -> tuple[Lines, dict[str, str], str]:
    logs = list(folder.glob("run-*.wandb"))
    if len(logs) != 1:
        raise refuse(f"{folder} has not one file run-*.wandb")
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]
    except ImportError:
        raise ConfigError("wandb is not installed", "in import", "pip install 'gptscale[wandb]'") from None
    lines: Lines = []
    options: dict[str, str] = {}
    error = "its log ends before it does"
    try:
        for content in _records(read_bytes(logs[0], BYTES_MAX, refuse)):
            record = Record.FromString(content)
            lines += [_cells(record.history.item)] if record.HasField("history") else []
            options |= _cells([*record.run.config.update, *record.config.update])
            if record.HasField("exit"):
                error = f"ended with status {record.exit.exit_code}" if record.exit.exit_code else ""
    except (DecodeError, ValueError) as damage:
        raise refuse(f"{logs[0].name} is damaged ({visible(str(damage))[:80]})") from None
    return lines, options, error


def _cells(items: Iterable[Any]) -> dict[str, str]:
    """Return the plain values among the items of a record by their names."""
    values = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
    return {name: str(value) for name, value in values.items() if isinstance(value, str | int | float)}


def _records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a log, but not one that was still being written, or raise ValueError for a damaged one."""
    if not log.startswith(WANDB_START):
        raise ValueError("it does not begin as a log")
    at, record = 7, b""
    while at + PART.size <= len(log):
        if BLOCK - at % BLOCK < PART.size:
            # A rest that is too short for a part is filled up.
            at += BLOCK - at % BLOCK
            continue
        check_sum, length, kind = PART.unpack_from(log, at)
        part, at = log[at + PART.size :][:length], at + PART.size + length
        if at <= len(log) and zlib.crc32(part, zlib.crc32(bytes([kind]))) != check_sum:
            raise ValueError(f"the check sum before byte {at}")
        record += part
        # A whole record, or the last part of one.
        if kind in (1, 4) and at <= len(log):
            yield record
            record = b""
