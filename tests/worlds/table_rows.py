"""The rows of a CSV, read by Python's own reader."""

import csv
from pathlib import Path


def rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV, such as the summary.csv of a results folder."""
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))
