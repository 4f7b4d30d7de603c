"""The command `gptscale bench verdict`: causes put into runs on purpose, what verdicts say, and what a cure gives.

Each case is two runs, with the cause and without. A row is written when it is measured; a later call with the same --csv goes on.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_output_file, check_ranges, parse_names
from gptscale.common.settings.command_line import parse
from gptscale.launchers.bench.measurement import print_written, tell
from gptscale.launchers.bench.quiet import QuietOptions, quiet_machine

RUN_LIMIT_S = 300.0
BUSY = "while True: pass"


@dataclass(frozen=True)
class VerdictBenchOptions(QuietOptions):
    """Which causes in which recipes, and how often."""

    causes: str = "all"
    """Causes with commas between, such as 'slow reader,healthy', or all."""
    recipes: str = "all"
    """Recipes with commas between, or all."""
    repeats: int = 2
    """Runs of each case."""
    steps: int = 25
    """Optimizer steps of a run."""
    csv: Path | None = None
    """File that grows by a row after each case. What it has already is not run again."""

    def __post_init__(self) -> None:
        check_ranges(self, {"repeats": (1, 1000), "steps": (20, 10_000)})
        check_output_file(self.csv, "--csv", "cannot be written")


def main(argv: Sequence[str]) -> int:
    """Run the cases that are left, print the table with the goals, and return 1 if one was missed."""
    options = parse(VerdictBenchOptions, argv, prog="gptscale bench verdict", about="Injected causes beside verdicts.")
    from gptscale.launchers.bench.verdict.cases import InjectedCase, cases

    every = list(cases())
    chosen = {
        name: set(parse_names(text, list(dict.fromkeys(getattr(c, name) for c in every)), name, f"--{name}s"))
        if (text := getattr(options, f"{name}s")) != "all"
        else {getattr(c, name) for c in every}
        for name in ("cause", "recipe")
    }
    wanted: list[InjectedCase] = [c for c in every if c.cause in chosen["cause"] and c.recipe in chosen["recipe"]]
    if not wanted:
        raise ConfigError("no case has these causes and recipes", "in bench verdict", "leave --recipes out")
    rows = _read(options.csv)
    done = {(row["cause"], row["recipe"], int(row["repeat"])) for row in rows}
    with quiet_machine(options, "bench verdict"):
        for repeat in range(options.repeats):
            for case in wanted:
                if (case.cause, case.recipe, repeat) not in done:
                    tell(f"{case.name} {repeat + 1}/{options.repeats} ...")
                    rows.append(measure(case, options.steps, repeat))
                    _append(options.csv, rows[-1])
    status = show([row for row in rows if row["cause"] in chosen["cause"] and row["recipe"] in chosen["recipe"]])
    print_written(options.csv)
    return status


def measure(case: Any, steps: int, repeat: int) -> dict[str, Any]:
    """Run a case with its cause and without, and return its row."""
    slow = run(case.recipe, case.slow, steps)
    row: dict[str, Any] = {"cause": case.cause, "recipe": case.recipe, "repeat": repeat, "expected": case.word}
    said = slow.get("bound_by", "")
    step_s = float(slow["step_time_s_median"])
    row |= {
        "said": said,
        "right": said == case.word if case.word else _is_none(said),
        "late_rank": slow.get("late_rank", ""),
    }
    row |= {"step_ms": 1e3 * step_s, "promised_ms": "", "cured_ms": "", "promised_gain": "", "real_gain": ""}
    row["taken"] = slow.get("taken_fraction", "")
    cause = next((c for c in slow["causes"] if c["name"] == case.word), None)
    if case.cured is not None and cause is not None:
        cured_s = float(run(case.recipe, case.cured, steps)["step_time_s_median"])
        promised_s = slow["remedied_s"] if slow["remedied_s"] is not None and said == case.word else cause["without_s"]
        row |= {"promised_ms": 1e3 * promised_s, "cured_ms": 1e3 * cured_s}
        row |= {"promised_gain": 1 - promised_s / step_s, "real_gain": 1 - cured_s / step_s}
    return row


def _is_none(said: str) -> bool:
    from gptscale.foresight.verdict.remedies import CAUSES

    return said not in CAUSES


def run(recipe: str, setting: Any, steps: int) -> dict[str, Any]:
    """Run a setting in a folder of its own, and return its row of the summary and its verdict."""
    from gptscale.common.process.program import Program
    from gptscale.common.process.warm_parent import run_captured
    from gptscale.launchers.bench.verdict.cases import NPROC
    from gptscale.launchers.bench.verdict.worker import MODULE

    folder = Path(tempfile.mkdtemp(prefix="gptscale-verdict-"))
    try:
        words = [*setting.options, "--steps", str(steps), "--out", str(folder), "--run-name", "run"]
        words += ["--nvme-path", str(folder / "nvme")] if recipe == "zero_infinity" else []
        (folder / "nvme").mkdir()
        program = Program(MODULE, ("launch", json.dumps([recipe, words, dict(setting.injected), NPROC])))
        environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | dict(setting.environment)
        with programs_beside(setting.beside):
            ended = run_captured(program, timeout=RUN_LIMIT_S, environ=environ)
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise ConfigError(f"a run of {recipe} failed: {last[:300]}", "in bench verdict", "see gptscale doctor")
        with (folder / "summary.csv").open(newline="") as file:
            row: dict[str, Any] = list(csv.DictReader(file))[-1]
        verdict = json.loads((folder / "runs/run/verdict.json").read_text())
        return row | {key: verdict[key] for key in ("causes", "remedied_s", "shares")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def programs_beside(cpus: tuple[int, ...] | None) -> Iterator[None]:
    """Keep these processors busy, each by a program of our own, until the end. None: all that there are."""
    usable = sorted(os.sched_getaffinity(0))
    programs = []
    try:
        for i in range(len(usable)) if cpus is None else cpus:
            program = subprocess.Popen([sys.executable, "-c", BUSY])
            programs.append(program)
            os.sched_setaffinity(program.pid, {usable[i % len(usable)]})
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def _read(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.is_file():
        return []
    with path.open(newline="") as file:
        return [row | {"right": row["right"] == "True"} for row in csv.DictReader(file)]


def _append(path: Path | None, row: dict[str, Any]) -> None:
    if path is None:
        return
    begins = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if begins:
            writer.writeheader()
        writer.writerow(row)


def show(rows: Sequence[dict[str, Any]]) -> int:
    """Print a row for each cause and the goals, and return 1 if one is missed."""
    from gptscale.foresight.verdict.remedies import CAUSES
    from gptscale.results.render import console, table

    printed = table(("cause", "runs", "right", "wrong word", "gain off, median", "worst"), left=("cause",))
    errors_of: dict[str, list[float]] = {}
    for row in rows:
        if row["promised_gain"] not in ("", None):
            error = abs(float(row["promised_ms"]) / float(row["cured_ms"]) - 1)
            errors_of.setdefault(row["cause"], []).append(error)
    for cause in dict.fromkeys(row["cause"] for row in rows):
        of_cause = [row for row in rows if row["cause"] == cause]
        wrong = [row for row in of_cause if not row["right"] and row["said"] in CAUSES]
        errors = errors_of.get(cause, [])
        figures = [f"{statistics.median(errors):.1%}", f"{max(errors):.1%}"] if errors else ["-", "-"]
        printed.add_row(cause, str(len(of_cause)), str(sum(r["right"] for r in of_cause)), str(len(wrong)), *figures)
    console(100).print(printed)
    n = len(rows)
    right = sum(row["right"] for row in rows)
    wrong_words = sum(not row["right"] and row["said"] in CAUSES for row in rows)
    in_healthy = sum(row["said"] in CAUSES for row in rows if not row["expected"])
    errors = sorted(error for of_cause in errors_of.values() for error in of_cause)
    median, p95 = (statistics.median(errors), errors[int(0.95 * (len(errors) - 1))]) if errors else (0.0, 0.0)
    goals = {
        f"right word in {right} of {n} (goal: 95 %)": right >= 0.95 * n,
        f"wrong word in {wrong_words} of {n} (goal: 1 %)": wrong_words <= 0.01 * n,
        f"a word in {in_healthy} healthy runs (goal: 0)": not in_healthy,
        f"cured steps beside promised ones: median {median:.1%} off, p95 {p95:.1%} (goals: 10 %, 20 %)": median <= 0.1
        and p95 <= 0.2,
    }
    for line, met in goals.items():
        print(f"{'met   ' if met else 'missed'}  {line}")
    return int(not all(goals.values()))
