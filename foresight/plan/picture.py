"""Pictures of a plan: what each stream of a row does when, its memory, and tokens/s against the number of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gptscale.foresight.memory.report import COLOURS, stack
from gptscale.foresight.plan.rows import PlannedRow
from gptscale.foresight.plan.trials import RECORDED
from gptscale.foresight.price.replay import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    DISK,
    HOST,
    KERNELS,
    PRODUCTS,
    Replayed,
    Span,
)
from gptscale.results.render import subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_row(row: PlannedRow) -> Figure:
    """Draw when each stream of a simulated row works, and what fills its memory over a step."""
    assert row.tried is not None
    assert row.simulated is not None
    n_lanes = len(lanes(row.tried.replayed))
    size = (13, max(4.0, 1.6 + 0.34 * n_lanes))
    figure, axes = subplots(1, 2, size, _title(row), gridspec_kw={"width_ratios": [5, 2]})
    gantt, memory = axes[0]
    draw_step(gantt, row.tried.replayed)
    stack(memory, row.simulated, list(COLOURS))
    memory.set_ylabel("GiB")
    handles, labels = memory.get_legend_handles_labels()
    memory.legend(handles[::-1], labels[::-1], fontsize=6, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_scaling(speeds: Mapping[str, Mapping[int, float]], title: str) -> Figure:
    """Draw tokens/s against the number of devices, of all and of each. speeds: of each split by devices."""
    figure, axes = subplots(1, 2, (11, 4.6), title)
    total, each = axes[0]
    for name, by_devices in speeds.items():
        counts, figures = list(by_devices), list(by_devices.values())
        total.plot(counts, figures, marker="o", label=name)
        each.plot(counts, [speed / n for n, speed in by_devices.items()], marker="o", label=name)
    counts = sorted({n for by_devices in speeds.values() for n in by_devices})
    if counts and speeds:
        first = max((by[counts[0]] for by in speeds.values() if counts[0] in by), default=0.0)
        in_proportion = [first * n / counts[0] for n in counts]
        total.plot(counts, in_proportion, color="#bbbbbb", linestyle="--", label="in proportion")
    total.set_yscale("log", base=2)
    for axis, what in ((total, "tokens/s"), (each, "tokens/s of each device")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_xlabel("devices")
        axis.set_ylabel(what)
    each.set_ylim(bottom=0)
    total.legend(fontsize=8, frameon=False)
    return figure


def explained(row: PlannedRow) -> list[str]:
    """Return how busy each stream of a row's ranks is, and with what."""
    assert row.tried is not None
    first = f"{row.name}, micro-batches {row.detail}: {1e3 * row.timing.seconds:,.1f} ms{_left_out(row)}"
    return [first, *letters(row.tried.replayed)]


def _left_out(row: PlannedRow) -> str:
    """Return which micro-batches are not drawn, because each further one takes as long as the one before."""
    run = row.candidate.run
    n = run.batch.grad_accum_steps
    return f"; drawn are {RECORDED} of {n} micro-batches" if run.pp_size == 1 and n > RECORDED else ""


def _title(row: PlannedRow) -> str:
    step = f"{row.timing.seconds * 1e3:,.0f} ms a step ({row.timing.grade}){_left_out(row)}"
    return f"{row.name}, micro-batches {row.detail}, on {row.cluster}: {step}"


def scaling_speeds(plans: Mapping[int, Sequence[PlannedRow]], most: int = 5) -> dict[str, dict[int, float]]:
    """Return tokens/s by devices of the splits that are best on most devices. plans: best rows by devices."""
    last = plans[max(plans)]

    def label(row: PlannedRow) -> tuple[str, int, int]:
        run = row.candidate.run
        # A pipeline or tensor recipe spreads over all devices, so its sizes change with them.
        return (run.recipe, 0, 0) if run.batch.dp_size == 1 else row.candidate.split

    speeds: dict[str, dict[int, float]] = {}
    for chosen in last[:most]:
        name = chosen.candidate.run.recipe
        name += "".join(
            f" {axis}{size}" for axis, size in zip(("tp", "pp"), label(chosen)[1:], strict=True) if size > 1
        )
        for devices, rows in sorted(plans.items()):
            same = [row.tokens_per_s for row in rows if label(row) == label(chosen)]
            if same:
                speeds.setdefault(name, {})[devices] = max(same)
    return speeds


COLOURS_OF_TIME = {PRODUCTS: "#4c72b0", ATTENTION: "#64b5cd", KERNELS: "#55a868", COPIES: "#da8bc3"}
COLOURS_OF_TIME |= {COLLECTIVES: "#ccb974", HOST: "#8c8c8c", DISK: "#937860"}
LETTERS = {PRODUCTS: "P", ATTENTION: "A", KERNELS: "k", COPIES: "=", COLLECTIVES: "~", HOST: "h", DISK: "d"}
# More streams than these are not told apart in a picture, and shorter bars not seen.
LANES_MAX, COLUMNS = 48, 4000


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
            axis.broken_barh(bars, (place - 0.4, 0.8), facecolors=COLOURS_OF_TIME[kind], linewidth=0)
    for place, (rank, _) in enumerate(drawn):
        exposed = [(1e3 * (a - begin), 1e3 * (b - a)) for a, b in steps[rank].exposed()]
        axis.broken_barh(exposed, (place + 0.4, 0.1), facecolors="red", linewidth=0)
    axis.set_yticks(range(len(drawn)), [f"rank {rank} {stream}" for rank, stream in drawn], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    for kind in dict.fromkeys(span.kind for spans in drawn.values() for span in spans):
        axis.plot([], [], color=COLOURS_OF_TIME[kind], linewidth=6, label=kind)
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


def letters(steps: Mapping[int, Replayed], columns: int = 80) -> list[str]:
    """Return how busy each stream is, with a letter for what it does most at each of `columns` moments."""
    begin = min(step.begins for step in steps.values())
    seconds = max(step.step_s for step in steps.values())
    lines = []
    for (rank, stream), spans in lanes(steps).items():
        filled: list[dict[str, float]] = [{} for _ in range(columns)]
        for span in spans:
            first, last = (columns * (time - begin) / seconds for time in (span.begin, span.end))
            for i in range(max(0, int(first)), min(columns, math.ceil(last))):
                filled[i][span.kind] = filled[i].get(span.kind, 0.0) + min(last, i + 1) - max(first, i)
        busy = sum(span.end - span.begin for span in spans) / seconds
        row = "".join(_letter(parts) for parts in filled)
        lines.append(f"  rank {rank:<3} {stream:<9} {busy:4.0%} {row}")
    words = ", ".join(f"{letter} {kind}" for kind, letter in LETTERS.items())
    return [*lines, f"  {words}, : less than half of the time, . nothing"]


def _letter(parts: Mapping[str, float]) -> str:
    if not parts:
        return "."
    return LETTERS[max(parts, key=lambda kind: parts[kind])] if sum(parts.values()) >= 0.5 else ":"
