"""The verdict on a run that has ended, from its folder: what limits it, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptscale.common.errors import ConfigError, visible
from gptscale.common.measure.evidence import EVIDENCE, FORMAT_VERSION, RankEvidence, RunEvidence, RunFacts
from gptscale.common.measure.exchanges import TracedExchange
from gptscale.common.measure.step_trace import RankTrace, TracedOperation
from gptscale.common.process.progress import StepMark
from gptscale.common.process.world import DEFAULT_TIMEOUT_S, World
from gptscale.foresight.calibrate.file import CalibratedMachine
from gptscale.foresight.verdict.calibrated import UNMEASURED, CalibratedRun, calibrated_run
from gptscale.foresight.verdict.files import read_versioned, write_trace, write_verdict
from gptscale.foresight.verdict.judge import Verdict, judge
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import resolve
from gptscale.results.columns import cell, cells_of, csv_line
from gptscale.results.record.files import locked, opened, replace_file
from gptscale.results.record.run_folder import read_json


def judge_run(folder: Path) -> Verdict:
    """Judge a run by the evidence in its folder, keep the verdict there and in the run's row, and return it.

    Raises ConfigError without evidence, or if it or run.json is damaged.
    """
    # Its name is the run's, and the row is in the folder above.
    folder = folder.resolve()
    evidence = read_evidence(folder)
    verdict = judge(evidence, _calibrated(folder, evidence) if evidence.facts.recipe else UNMEASURED)
    write_verdict(folder, verdict)
    traces = [rank.trace for rank in evidence.ranks]
    if any(trace.operations for trace in traces):
        print(f"wrote {write_trace(folder, traces)}", flush=True)
    set_cells(folder.parents[1] / evidence.summary, folder.name, verdict.columns())
    return verdict


def _calibrated(folder: Path, evidence: RunEvidence) -> CalibratedRun:
    """Return what a calibration of its machine expects of the run that run.json records. Raises ConfigError for a damaged one."""
    content = read_json(folder / "run.json")
    try:
        recipe, (_, _, _, _, _, *words) = content["recipe"], content["command"]
        identity, world_size = content["identity"], int(content["world_size"])
    except (KeyError, TypeError, ValueError):
        where = f"in {visible(str(folder))}"
        raise ConfigError("its run.json is cut or damaged", where, "run again") from None
    facts = evidence.facts
    device = torch.device("cuda", 0) if facts.cuda else torch.device("cpu")
    config, recipe_config = parse_run(recipe, words)
    run = resolve(recipe, config, recipe_config, World(0, 0, world_size, device, DEFAULT_TIMEOUT_S[device.type]))
    version, threads = identity["torch_version"].partition("+")[0], 1 if facts.cuda else facts.threads
    machine = CalibratedMachine(identity["device"], version, threads, world_size)
    return calibrated_run(run, [rank.trace for rank in evidence.ranks], machine)


BYTES_MAX = 2**30


def read_evidence(folder: Path) -> RunEvidence:
    """Read the evidence in a run's folder, or raise ConfigError if it is damaged."""
    return read_versioned(folder / EVIDENCE, FORMAT_VERSION, BYTES_MAX, _evidence)


def _evidence(content: dict[str, Any]) -> RunEvidence:
    late, ranks, facts = content["late"], content["ranks"], RunFacts(**content["facts"])
    known = [RankEvidence(**{**rank, "trace": _trace(rank["trace"])}) for rank in ranks]
    if not known or not content["step_times_s"] or Path(content["summary"]).name != content["summary"]:
        raise ValueError("it says nothing")
    return RunEvidence(**{**content, "late": late and tuple(late), "ranks": known, "facts": facts})


def _trace(content: dict[str, Any]) -> RankTrace:
    rows = {"segments": StepMark, "profiled": StepMark, "operations": TracedOperation}
    exchanges = {
        name: [TracedExchange(kind, tuple(ranks), *others) for kind, ranks, *others in content[name]]
        for name in ("exchanges", "profiled_exchanges")
    }
    marks = {name: [kind(*row) for row in content[name]] for name, kind in rows.items()}
    return RankTrace(**{**content, **marks, **exchanges, "processors": frozenset(content["processors"])})


def set_cells(path: Path, run_id: str, cells: Mapping[str, Any]) -> bool:
    """Replace cells in the last row of a run in a CSV that many runs share, and return whether it has such a row.

    The file is replaced in one move under its lock. All other bytes stay as they are, and so does a row that is not as
    `append_row` writes it. Cells without a column are left out. Raises StorageError as `append_row` does.
    """
    if not path.exists():
        return False
    with locked(path):
        with opened(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            header, *lines = file.read().split(b"\n")
        columns = cells_of(header)
        # Behind the last newline nothing stands, or a row that is torn.
        for place, line in reversed(list(enumerate(lines[:-1]))):
            row = dict(zip(columns, cells_of(line), strict=False)) if run_id.encode() in line else {}
            if row.get("run_id") == run_id and len(row) == len(columns) and csv_line(row.values()) == line + b"\n":
                row |= {name: cell(value) for name, value in cells.items() if name in row}
                lines[place] = csv_line(row.values())[:-1]
                replace_file(path, b"\n".join([header, *lines]))
                return True
    return False
