"""The rows of summaries by columns, so that a million of them fit into memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gptscale.common.errors import visible
from gptscale.results.columns import SUMMARY
from gptscale.results.comparison.run_files import TEXT_MAX, clip

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

TEXT = SUMMARY.of_type(str)
INTEGERS, FIGURES = SUMMARY.of_type(int), SUMMARY.of_type(float)
NUMBERS = [*INTEGERS, *FIGURES]
# Of a run that failed they may be NaN or infinite.
LOSSES = ("loss_first", "loss_last")
# What a row of a version without the column had.
BEFORE = {column.name: column.before for column in SUMMARY.columns if column.before}
# A status that only a comparison knows: nothing but this is known of the run.
DAMAGED = "damaged"

# Texts of which nearly every row has its own. Of the others there are few, and pandas keeps a number for each row.
OWN_TEXTS = ("run_id", "timestamp", "error")
SHARED_TEXTS = [column for column in (*TEXT, "folder") if column not in OWN_TEXTS]

EQUAL_TEXTS_MAX = 10_000


class SummaryRows:
    """The rows of summary files by columns, because a million rows as objects would fill the memory."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {column: [] for column in OWN_TEXTS}
        # A number for each row, and the texts that the numbers stand for.
        self.codes = {column: array("i") for column in SHARED_TEXTS}
        self.categories: dict[str, dict[str, int]] = {column: {} for column in SHARED_TEXTS}
        # Empty as long as no row has a figure in the column. Of a summary about half of the columns stay so.
        self.numbers = {column: array("d") for column in (*INTEGERS, *FIGURES)}
        # What to show for each text that was met. Equal ones are kept once.
        self._shown: dict[str, str] = {"": ""}

    def __len__(self) -> int:
        return len(self.texts["run_id"])

    def shown(self, text: str) -> str:
        """Return text as it may be printed."""
        shown = self._shown.get(text)
        if shown is None:
            shown = clip(visible(text))
            if len(self._shown) < EQUAL_TEXTS_MAX:
                self._shown[text] = shown
        return shown

    def add(self, columns: Mapping[str, NDArray[Any] | pd.Categorical]) -> None:
        """Append rows. Columns that no comparison shows are left out."""
        import numpy as np
        import pandas as pd

        for name, numbers in self.numbers.items():
            block = np.asarray(columns[name], dtype=float)
            if numbers or not np.isnan(block).all():
                numbers.frombytes(np.full(len(self) - len(numbers), math.nan).tobytes())
                numbers.frombytes(block.tobytes())
        for name, categories in self.categories.items():
            codes, uniques = pd.factorize(columns[name])
            texts_met: list[Any] = list(uniques)
            if name in BEFORE:
                texts_met = [text or BEFORE[name] for text in texts_met]
            numbers_met = [categories.setdefault(self.shown(text), len(categories)) for text in texts_met]
            self.codes[name].frombytes(np.array(numbers_met, dtype=np.intc)[codes].tobytes())
        for name, texts in self.texts.items():
            own: list[Any] = list(columns[name])
            # Errors are often equal, and are kept once. Of the others nearly every row has its own.
            is_plain = name != "error" and "".join(own).isprintable() and max(map(len, own), default=0) <= TEXT_MAX
            texts.extend(own if is_plain else map(self.shown, own))

    def frame(self) -> pd.DataFrame:
        """Move the columns into a table and return it. Of a run with several rows only the last counts."""
        import numpy as np
        import pandas as pd

        own = {name: np.array(self.texts.pop(name), dtype=object) for name in OWN_TEXTS}
        names = pd.Series(own["run_id"], dtype=object)
        pairs = pd.DataFrame(
            {"folder": np.frombuffer(self.codes["folder"], dtype=np.intc), "run_id": names}, copy=False
        )
        is_last = ~pairs.duplicated(keep="last").to_numpy()

        def kept(values: NDArray[Any]) -> NDArray[Any]:
            return values if is_last.all() else values[is_last]

        # Column by column, so that a million rows are not in memory twice.
        columns: dict[str, Any] = {}
        for name in OWN_TEXTS:
            columns[name] = pd.Series(kept(own.pop(name)), dtype=object)
        for name, categories in self.categories.items():
            codes = kept(np.frombuffer(self.codes.pop(name), dtype=np.intc))
            columns[name] = pd.Categorical.from_codes(codes, pd.Index(list(categories), dtype=object))
        for name in (*INTEGERS, *FIGURES):
            numbers = self.numbers.pop(name)
            values = kept(np.frombuffer(numbers)) if numbers else np.broadcast_to(math.nan, is_last.sum())
            columns[name] = _as_integers(values) if name in INTEGERS else values
        return pd.DataFrame(columns, copy=False)


def _as_integers(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return integers of as few bytes as the largest needs, and 0 for an empty cell."""
    import numpy as np

    integers = np.nan_to_num(numbers).astype(np.int64)
    largest = integers.max(initial=0)
    smallest: NDArray[Any] = integers.astype(
        next(kind for kind in (np.int8, np.int16, np.int32, np.int64) if largest <= np.iinfo(kind).max)
    )
    return smallest
