"""Pictures of a plan: what each rank and stream of a row does when, and tokens/s against the number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gptscale.foresight.memory.report import COLOURS
from gptscale.foresight.plan.limits import cause_of
from gptscale.foresight.plan.question import GIB
from gptscale.foresight.plan.rows import PlannedRow
from gptscale.results.render import subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK_COLOURS = {"forward": "#4c72b0", "backward": "#55a868", "head": "#8172b3", "optimizer": "#c44e52"}
CAUSE_COLOURS = {"links": "#ccb974", "bus": "#da8bc3", "disk": "#937860", "host": "#8c8c8c", "compute": "#64b5cd"}
# More ranks than these are not told apart in a picture.
RANKS_MAX = 16


def draw_row(row: PlannedRow) -> Figure:
    """Draw when each rank and stream of a row works, and what fills its memory."""
    played, machines = row.timing.played, row.cluster.machines(row.candidate.run.config.precision)
    assert played is not None
    items = [
        (item, begin, end - begin)
        for item, begin, end in zip(played.step.items, played.begins, played.ends, strict=True)
        if end > begin and item.rank < RANKS_MAX
    ]
    lanes = sorted(
        {(item.rank, item.stream) for item, _, _ in items}, key=lambda lane: (lane[0], lane[1] != "compute", lane[1])
    )
    figure, axes = subplots(1, 2, (13, 1.6 + 0.34 * len(lanes)), _title(row), gridspec_kw={"width_ratios": [5, 1]})
    gantt, memory = axes[0]
    drawn: dict[str, str] = {}
    for place, lane in enumerate(lanes):
        by_kind: dict[str, list[tuple[float, float]]] = {}
        for item, begin, length in items:
            if (item.rank, item.stream) == lane:
                causes = {cause_of(operation, machines) for operation in played.step.works[item.work]}
                by_kind.setdefault(_kind(item.name, causes), []).append((1e3 * begin, 1e3 * length))
        for kind, spans in by_kind.items():
            drawn[kind] = (BLOCK_COLOURS | CAUSE_COLOURS)[kind]
            gantt.broken_barh(spans, (place - 0.4, 0.8), facecolors=drawn[kind], linewidth=0)
    gantt.set_yticks(range(len(lanes)), [f"rank {rank} {stream}" for rank, stream in lanes], fontsize=8)
    gantt.invert_yaxis()
    gantt.set_xlabel("ms")
    for kind, colour in drawn.items():
        gantt.plot([], [], color=colour, linewidth=6, label=kind)
    gantt.legend(fontsize=7, frameon=False, ncols=len(drawn), loc="lower right", bbox_to_anchor=(1, 1))
    bottom = 0.0
    for owner, nbytes in sorted(row.places.device.items(), key=lambda item: -item[1]):
        memory.bar([""], [nbytes / GIB], bottom=bottom, color=COLOURS.get(owner, COLOURS["other"]), label=owner)
        bottom += nbytes / GIB
    memory.axhline(row.cluster.memory / GIB, color="red", linewidth=0.8)
    memory.set_title(f"{bottom:.1f} GiB", fontsize=8)
    memory.legend(fontsize=6, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_scaling(speeds: Mapping[str, Mapping[int, float]], title: str) -> Figure:
    """Draw tokens/s against the number of devices. speeds: of each split by devices."""
    figure, axes = subplots(1, 1, (8, 5), title)
    axis = axes[0][0]
    for name, by_devices in speeds.items():
        axis.plot(list(by_devices), list(by_devices.values()), marker="o", label=name)
    counts = sorted({n for by_devices in speeds.values() for n in by_devices})
    if counts and speeds:
        first = max((by[counts[0]] for by in speeds.values() if counts[0] in by), default=0.0)
        axis.plot(
            counts, [first * n / counts[0] for n in counts], color="#bbbbbb", linestyle="--", label="in proportion"
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(counts, [str(n) for n in counts])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel("devices")
    axis.set_ylabel("tokens/s")
    axis.legend(fontsize=8, frameon=False)
    return figure


def explained(row: PlannedRow) -> list[str]:
    """Return in words how busy each stream of a row's first rank is."""
    played = row.timing.played
    assert played is not None
    streams = sorted({(item.rank, item.stream) for item in played.step.items})
    n_written = (
        ""
        if row.candidate.run.pp_size > 1 or row.candidate.run.batch.grad_accum_steps <= 3
        else " (3 micro-batches of it)"
    )
    lines = [f"{row.name}, micro-batches {row.detail}: a step of {played.seconds * 1e3:,.1f} ms{n_written}"]
    for rank, stream in streams[: 2 * RANKS_MAX]:
        busy = played.busy_s(rank, stream)
        lines.append(f"  rank {rank:<3} {stream:<10} busy {busy * 1e3:10,.1f} ms  {busy / played.seconds:6.1%}")
    return lines


def _kind(name: str, causes: set[str]) -> str:
    if causes - {"compute", "links"} or causes == {"links"}:
        return next(iter(causes - {"compute"}))
    words = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
    first = name.split()[0]
    return first if first in BLOCK_COLOURS else words.get(first[:1], "compute")


def _title(row: PlannedRow) -> str:
    step = f"{row.timing.seconds * 1e3:,.0f} ms a step ({row.timing.grade})"
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
