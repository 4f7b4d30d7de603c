"""`gptscale import`: take a run that another program made into a results folder, for `gptscale compare`."""

from __future__ import annotations

import shutil
import statistics
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import RUN_NAME, check_range
from gptscale.common.settings.command_line import parse
from gptscale.results.columns import STEP_COLUMNS, SUMMARY, cell, csv_line
from gptscale.results.comparison.groups import CONFIGURATION, WORK
from gptscale.results.comparison.run_files import read_run_json
from gptscale.results.record.files import append_row, replace_file
from gptscale.results.record.foreign import NAMES, foreign_steps, read_foreign
from gptscale.results.record.run_folder import check_results_folder, read_json, run_directory

# Facts that a user may give. The rest follows from the steps.
FACTS = sorted({*CONFIGURATION, *WORK, "peak_mem_allocated_gib"} - {"recipe_options", "imported_from", "steps"})
# First steps that no speed counts, as in our runs.
WARM_UP = 3


@dataclass(frozen=True)
class ImportOptions:
    """What to import, and what is known of it. Its row is marked, and ranked beside ours only with --same-work."""

    kind: tyro.conf.Positional[Literal["wandb", "torchtitan", "lightning", "csv"]]
    """What wrote it."""
    path: tyro.conf.Positional[Path]
    """The folder of a run of Weights & Biases (offline-run-...), a log of torchtitan, a metrics.csv of Lightning, or any CSV."""
    out: Path = Path("results")
    """Results folder that gets the row, and the steps in runs/NAME."""
    run_name: str | None = None
    """Name of the imported run. Default: the kind and the name of the file."""
    map: str = ""
    """Names of figures there, step=NAME,loss=NAME and so on, where they are not the usual ones."""
    facts: str = ""
    """Columns of summary.csv that it does not tell, such as recipe=fsdp,world_size=8,global_batch_size=64,seq_len=1024."""
    same_work: str | None = None
    """A run of gptscale that did the same work, by its name in --out or by its folder: model, data, batches, options."""
    first_step: int | None = None
    """The number of its first training step. Default: 1, and 0 for Lightning."""


def main(argv: Sequence[str]) -> int:
    """Read what another program left, and write its row and its steps, or neither."""
    options = parse(ImportOptions, argv, prog="gptscale import", about="Take a run of another program beside ours.")
    check_range(options.first_step, 0, 10**9, "first_step")
    run_id = options.run_name or f"{options.kind}-{options.path.absolute().stem}"[:64]
    if not RUN_NAME.fullmatch(run_id):
        raise ConfigError(f"{run_id!r} is no name of a run", "in --run-name", "use letters, digits, - and _")
    check_results_folder(options.out, None, SUMMARY, resumes=False)
    if (options.out / "runs" / run_id).exists():
        raise ConfigError(f"run {run_id} exists already", f"in {options.out}", "choose another --run-name")
    names, said = _pairs(options.map, NAMES, "--map"), _pairs(options.facts, FACTS, "--facts")
    # A run of which nobody says so has the work of no other.
    work_hash, work = _work_of(options.out, options.same_work) if options.same_work else (uuid.uuid4().hex[:16], {})
    lines, recorded, error = read_foreign(options.kind, options.path)
    first = int(options.kind != "lightning") if options.first_step is None else options.first_step
    steps, used = foreign_steps(lines, names, first)
    facts = {name: _value(name, text) for name, text in (recorded | said).items() if name in FACTS}
    if other := [f"{n} is {facts[n]} here, {value} there" for n, value in work.items() if facts.get(n, value) != value]:
        raise ConfigError("the work differs: " + "; ".join(other), "in --same-work", "leave it out")
    facts = {"recipe": options.kind, "engine": options.kind, "world_size": 1} | work | facts
    row = {"run_id": run_id, "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **facts}
    row |= {"status": "failed" if error else "ok", "error": error, "workload_hash": work_hash}
    row |= {"imported_from": options.kind, "warmup_steps": WARM_UP, **_figures(steps, facts)}
    cells = ([int(step["step"]), *(step.get(name) for name in STEP_COLUMNS[1:])] for step in steps)
    table = b"".join([csv_line(STEP_COLUMNS), *(csv_line(map(cell, line)) for line in cells)])
    with run_directory(options.out, run_id) as folder:
        try:
            replace_file(folder / "steps.csv", table)
            append_row(SUMMARY, options.out, row)
        except BaseException:
            shutil.rmtree(folder)
            raise
    print(f"imported {run_id}: {len(steps):,} steps, loss {row['loss_first']:.4f} -> {row['loss_last']:.4f}")
    print(f"  read    {', '.join(f'{figure}={name}' for figure, name in used.items())}")
    print(f"  row     {options.out / SUMMARY.file}    (gptscale compare {options.out})")
    return 0


def _pairs(text: str, known: Collection[str], option: str) -> dict[str, str]:
    """Return the values in NAME=VALUE,NAME=VALUE by their names."""
    words = text.split(",") if text else []
    pairs = {name: value for name, _, value in (word.partition("=") for word in words)}
    if bad := [name for name, value in pairs.items() if name not in known or not value]:
        fix = f"write NAME=VALUE, with names of: {' '.join(known)}"
        raise ConfigError(f"{bad[0]!r} is no such name, or has no value", f"in {option}", fix)
    return pairs


def _value(name: str, text: str) -> Any:
    try:
        value = SUMMARY[name].type(text)
        if isinstance(value, str) or (name == "world_size") <= value <= 10**18:
            return value
    except ValueError:
        pass
    raise ConfigError(f"{name} {text[:40]!r} is no such number", "in --facts", f"give {name}=NUMBER")


def _work_of(out: Path, run: str) -> tuple[str, dict[str, Any]]:
    """Return the workload_hash of a run of ours, and the columns that tell its work."""
    folder = (Path(run) if "/" in run else out / "runs" / run).absolute()
    start = read_run_json(str(folder.parents[1]), folder.name)
    if start.workload is None:
        what = start.damage or f"{folder} has no run.json"
        raise ConfigError(what, "in --same-work", "name a run of ours that lies in --out, or its folder")
    identity = read_json(folder / "run.json").get("identity", {})
    return start.workload_hash, {name: identity[name] for name in WORK if name in identity}


def _figures(steps: Sequence[dict[str, float]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a row, and add to the steps what follows of their times.

    A speed is that of the median step, as of our runs. Without batch and length it is the median of those that were logged.
    """
    import numpy as np

    tokens = facts.get("global_batch_size", 0) * facts.get("seq_len", 0)
    for step, before in zip(steps, [steps[0], *steps], strict=False):
        if "tokens_per_s_per_device" in step:
            step.setdefault("tokens_per_s", step["tokens_per_s_per_device"] * facts["world_size"])
        if "elapsed_s" in step and step["elapsed_s"] > before.get("elapsed_s", step["elapsed_s"]):
            step.setdefault("step_time_s", (step["elapsed_s"] - before["elapsed_s"]) / (step["step"] - before["step"]))
        if tokens and step.get("tokens_per_s"):
            step.setdefault("step_time_s", tokens / step["tokens_per_s"])
    timed = [step for step in steps if step["step"] >= steps[0]["step"] + WARM_UP]
    times, speeds = ([step[name] for step in timed if step.get(name)] for name in ("step_time_s", "tokens_per_s"))
    first, last = steps[0], steps[-1]
    row: dict[str, Any] = {"loss_first": first["loss"], "loss_last": last["loss"], "steps": int(last["step"])}
    if times:
        names = ("step_time_s_p10", "step_time_s_median", "step_time_s_p90")
        row |= zip(names, map(float, np.quantile(times, (0.1, 0.5, 0.9))), strict=True)
        speeds = [tokens / row["step_time_s_median"]] if tokens else speeds
    if speeds:
        row["tokens_per_s"] = statistics.median(speeds)
        row["tokens_per_s_per_device"] = row["tokens_per_s"] / facts["world_size"]
    return row
