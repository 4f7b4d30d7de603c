"""The files of a verdict in a run's folder: verdict.json, and for --profile trace.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from gptscale.common.errors import ConfigError, visible
from gptscale.common.measure.evidence import VERDICT
from gptscale.common.measure.step_trace import RankTrace
from gptscale.common.settings import user_file
from gptscale.foresight.verdict.causes import WORDS
from gptscale.foresight.verdict.judge import SizedCause, Verdict
from gptscale.results.record.files import replace_file, write_json

FORMAT_VERSION = 1
T = TypeVar("T")
TRACE_NAME = "trace.json"
# Nobody could read a picture with more pieces.
PIECES_MAX = 20_000
BYTES_MAX = 2**26
# Names of the ranges of exchanges, by how the names of their kinds begin.
EXCHANGES = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "all-reduce"}


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Write a verdict into a run's folder."""
    drawn = sum(map(len, verdict.ranks)) <= PIECES_MAX
    content = dataclasses.asdict(verdict) | {"format_version": FORMAT_VERSION, "line": verdict.line()}
    write_json(folder / VERDICT, content | ({} if drawn else {"ranks": []}))


def read_verdict(folder: Path) -> Verdict:
    """Read the verdict of a run's folder, or raise ConfigError that says why there is none."""
    where = f"in {visible(str(folder))}"
    if not folder.is_dir():
        raise ConfigError("this run does not exist", where, "give the folder of a run, such as results/runs/NAME")
    if not (folder / VERDICT).exists():
        fix = "run it with 20 steps or more, and without --no-verdict"
        raise ConfigError("this run has no verdict", where, fix)
    return read_versioned(folder / VERDICT, FORMAT_VERSION, BYTES_MAX, _verdict)


def read_versioned(file: Path, version: int, bytes_max: int, parse: Callable[[dict[str, Any]], T]) -> T:
    """Return what `parse` makes of a JSON file of a run, or raise ConfigError if it is damaged or of another version."""
    where = f"in {visible(str(file.parent))}"

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"its {file.name} is cut or damaged ({reason})", where, "run again")

    content = user_file.read_json(file, bytes_max, refuse)
    try:
        found = content.pop("format_version")
        if found != version:
            fix = "read it with the gptscale that wrote it, or run again"
            raise ConfigError(f"its {file.name} has version {visible(str(found)[:20])}, not {version}", where, fix)
        return parse(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise refuse(type(error).__name__) from None


def _verdict(content: dict[str, Any]) -> Verdict:
    """Return the verdict in the content of a file, or raise ValueError, TypeError or KeyError if it is none."""
    fields_of_verdict = {field.name for field in dataclasses.fields(Verdict)}
    verdict = Verdict(**{name: value for name, value in content.items() if name in fields_of_verdict})
    causes = [SizedCause(str(c["name"]), _number(c["without_s"]), _number(c["share"])) for c in verdict.causes]  # type: ignore[index]
    ranks = [[(str(what), _number(a), _number(b)) for what, a, b in pieces] for pieces in verdict.ranks]
    shares = {visible(str(name)): _number(share) for name, share in verdict.shares.items()}
    for value in (verdict.step_s, verdict.spread, verdict.traced_s, verdict.remedied_s or 0.0):
        _number(value)
    if verdict.bound_by not in WORDS or any(cause.name not in WORDS for cause in causes) or verdict.step_s <= 0:
        raise ValueError("a word that no verdict has")
    if not (verdict.late_rank is None or isinstance(verdict.late_rank, int)):
        raise TypeError("a rank is a number")
    notes = [visible(str(note)) for note in verdict.notes]
    remedy, differs = visible(str(verdict.remedy)), visible(str(verdict.differs))
    return dataclasses.replace(
        verdict, causes=causes, ranks=ranks, shares=shares, notes=notes, remedy=remedy, differs=differs
    )


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def write_trace(folder: Path, traces: Sequence[RankTrace]) -> Path:
    """Write the profiled step of all ranks beside each other, in the format of Chrome's trace viewer, and return the path."""
    began = min((t.profiled[0].begin for t in traces if t.profiled), default=0.0)
    events: list[dict[str, Any]] = []
    for trace in traces:
        events.append({"name": "process_name", "ph": "M", "pid": trace.rank, "args": {"name": f"rank {trace.rank}"}})
        for row, name, begin, end in _ranges(trace):
            times = {"ts": round(1e6 * (begin - began), 3), "dur": round(1e6 * (end - begin), 3)}
            events.append({"name": name, "ph": "X", "pid": trace.rank, "tid": row, **times})
        # Exchanges may overlap, which ranges of one row must not.
        for place, (name, begin, end) in enumerate(_exchanges(trace)):
            same = {"name": name, "cat": "exchange", "pid": trace.rank, "id": f"{trace.rank}.{place}"}
            events += [
                same | {"tid": "exchanges", "ph": ph, "ts": round(1e6 * (t - began), 3)}
                for ph, t in (("b", begin), ("e", end))
            ]
    path = folder / TRACE_NAME
    replace_file(path, json.dumps({"traceEvents": events}).encode())
    return path


def _ranges(trace: RankTrace) -> Iterator[tuple[str, str, float, float]]:
    """Yield what a rank's profiled step has to show, as (row, name, begin, end)."""
    if trace.profiled:
        yield "step", "step", trace.profiled[0].begin, trace.profiled[-1].end
    for micro_batch, marks in groupby(trace.profiled, lambda mark: mark.micro_batch):
        together = list(marks)
        if micro_batch >= 0:
            yield "micro-batches", f"micro-batch {micro_batch}", together[0].begin, together[-1].end
    for (part, waits), marks in groupby(trace.profiled, lambda mark: (mark.part, mark.waits)):
        together = list(marks)
        yield "parts", "wait" if waits else part, together[0].begin, together[-1].end
    for operation in trace.operations:
        yield "device" if operation.on_device else "operations", operation.name, operation.begin, operation.end


def _exchanges(trace: RankTrace) -> Iterator[tuple[str, float, float]]:
    """Yield the exchanges of the profiled step that Python began, as (name, begin, end of the wait for it)."""
    over = {mark.exchange: mark.end for mark in trace.profiled if mark.exchange >= 0}
    for place, exchange in enumerate(trace.profiled_exchanges):
        name = next((name for kind, name in EXCHANGES.items() if exchange.kind.startswith(kind)), exchange.kind)
        yield name, exchange.begun, over.get(place, exchange.begun)
