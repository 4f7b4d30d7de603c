"""The file of a calibration: which operation took how many seconds, on which machine, under which versions.

Nothing in it is ever overwritten. A new measurement is added beside the old ones, and a reader combines those of one machine.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gptscale.common.errors import ConfigError, DataError
from gptscale.common.process.mock import is_mock
from gptscale.common.settings.user_file import read_json
from gptscale.ops.build.cache import root
from gptscale.results.record.files import locked, write_json

FORMAT_VERSION = 2
# More than a hundred thousand measurements.
FILE_BYTES_MAX = 2**25
# Two medians of a quiet machine differ by so much.
SPREAD_MIN = 0.01


class CalibratedMachine(NamedTuple):
    """What figures must have in common to be compared. world: how many ranks worked at once."""

    device: str
    torch: str
    threads: int
    world: int


class Operation(NamedTuple):
    """One kind of work on one shape.

    product: rows, inner size, columns. attention forward, attention backward: tokens, numbers of a token, heads, sequence. pass:
    bytes read and written. copy: bytes over the bus. Of a collective or a message (send): bytes, ranks, and how many of them are
    on a node.
    """

    kind: str
    shape: tuple[int, ...]


class TimedOperation(NamedTuple):
    """An operation and its median seconds. precision: of the products. spread: of the repeats, relative."""

    operation: Operation
    precision: str
    seconds: float
    spread: float
    repeats: int
    date: str = ""


@dataclass
class MeasuredMachine:
    """Everything that was measured on one machine, oldest first."""

    machine: CalibratedMachine
    operations: list[TimedOperation] = field(default_factory=list)

    def combined(self, precision: str) -> dict[Operation, TimedOperation]:
        """Return each operation once: the mean of its measurements by their spread, which grows if they disagree."""
        groups: dict[Operation, list[TimedOperation]] = {}
        for timed in self.operations:
            if timed.precision == precision:
                groups.setdefault(timed.operation, []).append(timed)
        return {operation: _combined(group) for operation, group in groups.items()}


def _combined(group: Sequence[TimedOperation]) -> TimedOperation:
    weights = [max(timed.spread, SPREAD_MIN) ** -2 for timed in group]
    logs = [math.log(timed.seconds) for timed in group]
    mean = sum(w * log for w, log in zip(weights, logs, strict=True)) / sum(weights)
    apart = sum(w * (log - mean) ** 2 for w, log in zip(weights, logs, strict=True)) / sum(weights)
    spread = math.sqrt(len(group) / sum(weights) + apart)
    return group[-1]._replace(seconds=math.exp(mean), spread=spread, repeats=sum(timed.repeats for timed in group))


def default_file() -> Path:
    """Return where calibrations are kept unless another file is given."""
    return root() / f"calibration-{FORMAT_VERSION}.json"


def read(path: Path) -> list[MeasuredMachine]:
    """Return the machines of a file, none if there is no file. Raises DataError for a file that is no calibration."""
    if not path.exists():
        return []
    anew = "measure anew with gptscale calibrate --out NEW_FILE"

    def refuse(reason: str) -> DataError:
        return DataError(f"this is no calibration ({reason})", f"in {path}", anew)

    content = read_json(path, FILE_BYTES_MAX, refuse)
    try:
        version = content["format"]
        if version != FORMAT_VERSION:
            what = f"the calibration has format {version}, and this gptscale reads {FORMAT_VERSION}"
            raise DataError(what, f"in {path}", anew)
        return [_machine(entry) for entry in content["machines"]]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise refuse(f"{type(error).__name__}: {str(error)[:160]}") from error


def add(path: Path, measured: MeasuredMachine) -> list[MeasuredMachine]:
    """Add measurements to a file, beside those that it has, and return all machines of it.

    Raises ConfigError under the mock of CUDA, which has no speed.
    """
    if is_mock():
        raise ConfigError("CUDA is a mock that computes nothing", "in --out", "measure on a machine with a GPU")
    today = datetime.date.today().isoformat()
    with locked(path):
        machines = read(path)
        earlier = next((m for m in machines if m.machine == measured.machine), None)
        if earlier is None:
            machines.append(earlier := MeasuredMachine(measured.machine))
        earlier.operations += [timed._replace(date=timed.date or today) for timed in measured.operations]
        content = [m.machine._asdict() | {"operations": [*map(_cells, m.operations)]} for m in machines]
        write_json(path, {"format": FORMAT_VERSION, "machines": content})
    return machines


def _cells(timed: TimedOperation) -> dict[str, Any]:
    cells = timed.operation._asdict() | timed._asdict()
    del cells["operation"]
    return cells


def _machine(entry: Any) -> MeasuredMachine:
    machine = CalibratedMachine(str(entry["device"]), str(entry["torch"]), int(entry["threads"]), int(entry["world"]))
    operations = [
        TimedOperation(
            Operation(str(o["kind"]), tuple(int(n) for n in o["shape"])),
            str(o["precision"]),
            _finite(o["seconds"], "seconds", math.ulp(0.0)),
            _finite(o["spread"], "as a spread", 0.0),
            int(o["repeats"]),
            str(o["date"]),
        )
        for o in entry["operations"]
    ]
    return MeasuredMachine(machine, operations)


def _finite(figure: Any, name: str, least: float) -> float:
    if not least <= float(figure) < math.inf:
        raise ValueError(f"{figure} {name}")
    return float(figure)
