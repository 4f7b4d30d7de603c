"""Pictures of a plan: what each rank and stream of a row does when, and tokens/s against the number of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gptscale.foresight.memory.report import COLOURS, stack
from gptscale.foresight.plan.limits import cause_of
from gptscale.foresight.plan.question import GIB
from gptscale.foresight.plan.rows import PlannedRow
from gptscale.foresight.plan.steps import WRITTEN
from gptscale.foresight.time.work import COMPUTE, LAUNCHES
from gptscale.results.render import subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND_COLOURS = {"forward": "#4c72b0", "backward": "#55a868", "head": "#8172b3", "optimizer": "#c44e52"}
KIND_COLOURS |= {"links": "#ccb974", "bus": "#da8bc3", "disk": "#937860", "host": "#8c8c8c", "compute": "#64b5cd"}
LETTERS = {kind: kind[0].upper() for kind in ("forward", "backward", "head", "optimizer")}
LETTERS |= {"links": "~", "bus": "=", "disk": "d", "host": "h", "compute": "c"}
# More streams than these are not told apart in a picture.
LANES_MAX = 48


def draw_row(row: PlannedRow) -> Figure:
    """Draw when each rank and stream of a row works, and what fills its memory, over a step if that was simulated."""
    spans = _spans(row)
    lanes = list(spans)[:LANES_MAX]
    ratios = [5, 2 if row.simulated else 1]
    size = (13, max(4.0 if row.simulated else 2.6, 1.6 + 0.34 * len(lanes)))
    figure, axes = subplots(1, 2, size, _title(row), gridspec_kw={"width_ratios": ratios})
    gantt, memory = axes[0]
    drawn: list[str] = []
    for place, lane in enumerate(lanes):
        for kind, intervals in spans[lane].items():
            drawn += [kind] if kind not in drawn else []
            bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in intervals]
            gantt.broken_barh(bars, (place - 0.4, 0.8), facecolors=KIND_COLOURS[kind], linewidth=0)
    gantt.set_yticks(range(len(lanes)), [f"rank {rank} {stream}" for rank, stream in lanes], fontsize=8)
    gantt.invert_yaxis()
    gantt.set_xlabel("ms")
    for kind in drawn:
        gantt.plot([], [], color=KIND_COLOURS[kind], linewidth=6, label=kind)
    gantt.legend(fontsize=7, frameon=False, ncols=len(drawn), loc="lower right", bbox_to_anchor=(1, 1))
    if row.simulated:
        stack(memory, row.simulated, list(COLOURS))
    else:
        _stack_peak(memory, row)
    memory.set_ylabel("GiB")
    handles, labels = memory.get_legend_handles_labels()
    memory.legend(handles[::-1], labels[::-1], fontsize=6, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _stack_peak(axis: Any, row: PlannedRow) -> None:
    """Draw the bound of the peak as one bar."""
    bottom = 0.0
    for owner, nbytes in sorted(row.places.device.items(), key=lambda item: -item[1]):
        axis.bar([""], [nbytes / GIB], bottom=bottom, color=COLOURS.get(owner, COLOURS["other"]), label=owner)
        bottom += nbytes / GIB
    axis.axhline(row.cluster.memory / GIB, color="red", linewidth=0.8, label="the device")
    axis.set_title(f"peak ~{bottom:.1f} GiB", fontsize=9)


def _spans(row: PlannedRow) -> dict[tuple[int, str], dict[str, list[tuple[float, float]]]]:
    """Return for each rank and stream the kinds of its work, each with begins and ends in seconds."""
    played, machines = row.timing.played, row.cluster.machines(row.candidate.run.config.precision)
    assert played is not None
    kinds: dict[tuple[str, int], str] = {}
    lanes: dict[tuple[int, str], dict[str, list[tuple[float, float]]]] = {}
    for item, begin, end in zip(played.step.items, played.begins, played.ends, strict=True):
        if end > begin:
            name = item.name.split()[0]
            if (name, item.work) not in kinds:
                work = played.step.works[item.work]
                causes = {cause_of(operation, machines) for operation in work if operation.kind != LAUNCHES}
                kinds[name, item.work] = _kind(name, causes)
            lanes.setdefault((item.rank, item.stream), {}).setdefault(kinds[name, item.work], []).append((begin, end))
    return dict(sorted(lanes.items(), key=lambda lane: (lane[0][0], lane[0][1] != COMPUTE, lane[0][1])))


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


def explained(row: PlannedRow, columns: int = 80) -> list[str]:
    """Return how busy each stream of a row's ranks is, with a letter for what it does at each of `columns` moments."""
    played = row.timing.played
    assert played is not None
    lines = [f"{row.name}, micro-batches {row.detail}: {1e3 * played.seconds:,.1f} ms{_left_out(row)}"]
    for (rank, stream), by_kind in list(_spans(row).items())[:LANES_MAX]:
        busy = played.busy_s(rank, stream) / played.seconds
        lines.append(f"  rank {rank:<3} {stream:<9} {busy:4.0%} {_letters(by_kind, played.seconds, columns)}")
    words = ", ".join(f"{letter} {kind}" for kind, letter in LETTERS.items())
    return [*lines, f"  {words}, : less than half of the time, . nothing"]


def _letters(by_kind: Mapping[str, Sequence[tuple[float, float]]], seconds: float, columns: int) -> str:
    """Return what a stream does most in each of `columns` equal parts of a step."""
    filled: list[dict[str, float]] = [{} for _ in range(columns)]
    for kind, spans in by_kind.items():
        for begin, end in spans:
            first, last = columns * begin / seconds, columns * end / seconds
            for i in range(int(first), min(columns, math.ceil(last))):
                filled[i][kind] = filled[i].get(kind, 0.0) + min(last, i + 1) - max(first, i)
    most = [max(parts, key=parts.__getitem__, default="") for parts in filled]
    letters = (
        LETTERS[kind] if sum(parts.values()) >= 0.5 else ":" for kind, parts in zip(most, filled, strict=True) if kind
    )
    return "".join(next(letters) if kind else "." for kind in most)


def _kind(name: str, causes: set[str]) -> str:
    """Return what an item does, by the first word of its name and the resources that it uses."""
    if causes - {"compute", "links"} or causes == {"links"}:
        return next(iter(causes - {"compute"}))
    words = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
    return name if name in KIND_COLOURS else words.get(name[:1], "compute")


def _left_out(row: PlannedRow) -> str:
    """Return which micro-batches are not drawn, because each further one takes as long as the last."""
    run = row.candidate.run
    n = run.batch.grad_accum_steps
    return f" of {WRITTEN} of {n} micro-batches" if run.pp_size == 1 and n > WRITTEN and not row.cluster.is_cpu else ""


def _title(row: PlannedRow) -> str:
    drawn = f"; drawn: {_left_out(row).removeprefix(' of ')}" if _left_out(row) else ""
    step = f"{row.timing.seconds * 1e3:,.0f} ms a step ({row.timing.grade}){drawn}"
    return f"{row.name}, micro-batches {row.detail}, on {row.cluster}: {step}"


def scaling_speeds(plans: Mapping[int, Sequence[PlannedRow]], most: int = 5) -> dict[str, dict[int, float]]:
    """Return tokens/s by devices of the splits that are best on most devices. plans: best rows by devices."""
    last = plans[max(plans)]

    def label(row: PlannedRow) -> tuple[str, int, int]:
        run = row.candidate.run
        # A pipeline or tensor recipe spreads over all devices, so its sizes change with them.
        return (run.recipe, 0, 0) if run.batch.dp_size == 1 else row.candidate.split

    speeds: dict[str, dict[int, float]] = {}
    for chosen in [row for row in last if not row.timing.refused][:most]:
        name = chosen.candidate.run.recipe
        name += "".join(
            f" {axis}{size}" for axis, size in zip(("tp", "pp"), label(chosen)[1:], strict=True) if size > 1
        )
        for devices, rows in sorted(plans.items()):
            same = [row.tokens_per_s for row in rows if label(row) == label(chosen) and not row.timing.refused]
            if same:
                speeds.setdefault(name, {})[devices] = max(same)
    return speeds
