"""A timeline in a file, so that one process records it and another reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gptscale.foresight.memory.timeline import Allocations, Timeline


def save_timeline(timeline: Timeline, path: Path) -> None:
    """Write a timeline as NumPy's .npz."""
    a = timeline.allocations
    owners, owner = np.unique(np.array(a.owner, dtype=str), return_inverse=True)
    times, parts = zip(*timeline.marks, strict=True) if timeline.marks else ((), ())
    np.savez(
        path,
        born=a.born,
        died=a.died,
        nbytes=a.nbytes,
        owner=owner,
        owners=owners,
        times=timeline.times,
        mark_times=np.array(times, dtype=np.int64),
        mark_parts=np.array(parts, dtype=str),
        steps=np.array(timeline.steps, dtype=np.int64),
    )


def load_timeline(path: Path) -> Timeline:
    """Read what `save_timeline` wrote."""
    with np.load(path) as file:
        owner = file["owners"][file["owner"]].tolist()
        marks = list(zip(file["mark_times"].tolist(), file["mark_parts"].tolist(), strict=True))
        allocations = Allocations(file["born"], file["died"], file["nbytes"], owner)
        return Timeline(allocations, int(file["times"]), marks, file["steps"].tolist())
