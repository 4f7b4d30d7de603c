"""What each stream of a replayed step does when: as bars with the exposed communication marked, and in letters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gptscale.foresight.price import replay
from gptscale.foresight.price.replay import COLLECTIVES, Replayed, Span

KINDS = (replay.PRODUCTS, replay.ATTENTION, replay.KERNELS, replay.COPIES, COLLECTIVES, replay.HOST, replay.DISK)
COLOURS = dict(zip(KINDS, "#4c72b0 #64b5cd #55a868 #da8bc3 #ccb974 #8c8c8c #937860".split(), strict=True))
LETTERS = dict(zip(KINDS, "PAk=~hd", strict=True))
# More streams than these are not told apart in a picture, and shorter bars not seen.
LANES_MAX, COLUMNS = 48, 4000
MOMENTS = 80


def lanes(steps: Mapping[int, Replayed]) -> dict[tuple[int, str], list[Span]]:
    """Return what each rank does in each of its streams, those that compute first."""
    found: dict[tuple[int, str], list[Span]] = {}
    for rank, step in steps.items():
        streams: dict[tuple[bool, int], list[Span]] = {}
        for span in step.spans:
            streams.setdefault((span.kind == COLLECTIVES, span.work.stream), []).append(span)
        counts = [0, 0]
        for (sends, _), spans in sorted(streams.items()):
            counts[sends] += 1
            found[rank, f"{'link' if sends else 'stream'} {counts[sends]}"] = spans
    return dict(list(found.items())[:LANES_MAX])


def draw_step(axis: Any, steps: Mapping[int, Replayed]) -> None:
    """Draw the streams of ranks over one step, in ms. Red is what is communicated while nothing is computed."""
    drawn = lanes(steps)
    begin = min(step.begins for step in steps.values())
    length = max(step.step_s for step in steps.values())
    for place, spans in enumerate(drawn.values()):
        for kind, bars in _bars(spans, begin, length / COLUMNS).items():
            axis.broken_barh(bars, (place - 0.4, 0.8), facecolors=COLOURS[kind], linewidth=0)
    for place, (rank, _) in enumerate(drawn):
        exposed = [(1e3 * (a - begin), 1e3 * (b - a)) for a, b in steps[rank].exposed()]
        axis.broken_barh(exposed, (place + 0.4, 0.1), facecolors="red", linewidth=0)
    axis.set_yticks(range(len(drawn)), [f"rank {rank} {stream}" for rank, stream in drawn], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    for kind in dict.fromkeys(span.kind for spans in drawn.values() for span in spans):
        axis.plot([], [], color=COLOURS[kind], linewidth=6, label=kind)
    axis.plot([], [], color="red", linewidth=2, label="only communication")
    axis.legend(fontsize=7, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))


def _bars(spans: Sequence[Span], begin: float, least: float) -> dict[str, list[tuple[float, float]]]:
    """Return begins and lengths in ms of each kind. Neighbours whose gap nobody would see are one bar."""
    bars: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        of_kind = bars.setdefault(span.kind, [])
        if of_kind and span.begin - of_kind[-1][1] < least:
            of_kind[-1] = (of_kind[-1][0], max(of_kind[-1][1], span.end))
        else:
            of_kind.append((span.begin, span.end))
    return {kind: [(1e3 * (a - begin), 1e3 * (b - a)) for a, b in of_kind] for kind, of_kind in bars.items()}


def letters(steps: Mapping[int, Replayed]) -> list[str]:
    """Return how busy each stream is, with a letter for what it does most at each of MOMENTS moments."""
    begin = min(step.begins for step in steps.values())
    seconds = max(step.step_s for step in steps.values())
    lines = []
    for (rank, stream), spans in lanes(steps).items():
        pieces = ((span.kind, span.begin - begin, span.end - begin) for span in spans)
        busy = sum(span.end - span.begin for span in spans) / seconds
        row = "".join(_letter(parts) for parts in filled(pieces, MOMENTS, seconds))
        lines.append(f"  rank {rank:<3} {stream:<9} {busy:4.0%} {row}")
    words = ", ".join(f"{letter} {kind}" for kind, letter in LETTERS.items())
    return [*lines, f"  {words}, : less than half of the time, . nothing"]


def filled(pieces: Iterable[tuple[str, float, float]], columns: int, seconds: float) -> list[dict[str, float]]:
    """Return how much of each of `columns` moments is filled with what. pieces: what it is, its begin and its end."""
    cells: list[dict[str, float]] = [{} for _ in range(columns)]
    for what, begin, end in pieces:
        first, last = (columns * time / seconds for time in (begin, end))
        for i in range(max(0, int(first)), min(columns, math.ceil(last))):
            cells[i][what] = cells[i].get(what, 0.0) + min(last, i + 1) - max(first, i)
    return cells


def _letter(parts: Mapping[str, float]) -> str:
    if not parts:
        return "."
    return LETTERS[max(parts, key=lambda kind: parts[kind])] if sum(parts.values()) >= 0.5 else ":"
