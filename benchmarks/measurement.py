"""What the benches share: lines of progress, circumstances of a measurement, a CSV that grows, and cells of a table."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptscale.common.settings.shape import ModelConfig

if TYPE_CHECKING:
    import pandas as pd


def tell(line: str) -> None:
    """Print a line of progress to stderr, so that stdout holds the result alone."""
    print(line, file=sys.stderr, flush=True)


def circumstances(
    gpt: ModelConfig, *, batch_size: int, dtype: str, threads: int, device: str, command: str, data: str | None = None
) -> dict[str, Any]:
    """Return what all rows of a bench share: the model's shape, the work, the machine, torch's version, date and command."""
    import torch

    return {
        "hidden": gpt.n_embd,
        "layers": gpt.n_layer,
        "heads": gpt.n_head,
        "seq_len": gpt.block_size,
        "vocab_size": gpt.vocab_size,
        "batch_size": batch_size,
        "dtype": dtype,
        **({} if data is None else {"data": data}),
        "threads": threads,
        "device": device,
        "torch_version": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def collect(rows: Iterable[Mapping[str, Any]], csv: Path | None, **shared: Any) -> pd.DataFrame:
    """Return the rows as a frame, with the columns `shared` behind their own.

    After each row the CSV is written anew, so that a bench that is cut short leaves what it measured.
    """
    import pandas as pd

    collected: list[Mapping[str, Any]] = []
    frame = pd.DataFrame()
    for row in rows:
        collected.append(row)
        frame = pd.DataFrame(collected).assign(**shared)
        write_csv(frame, csv)
    return frame


def write_csv(frame: pd.DataFrame, csv: Path | None) -> None:
    """Write the frame to the file, whole or not at all, and do nothing without a file."""
    from gptscale.results.record.files import replace_file

    if csv is not None:
        replace_file(csv, frame.to_csv(index=False).encode())


def or_dash(value: float | None, form: str) -> str:
    """Return a figure in the format `form`, or a dash for None and for NaN, the empty cell of a frame."""
    return "-" if value is None or value != value else format(value, form)


def print_written(*files: Path | None) -> None:
    """Print the names of the files that were written."""
    for file in files:
        if file is not None:
            print(f"wrote {file}")
