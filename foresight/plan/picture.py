"""Pictures of a plan: what each stream of a row does when, its memory, and tokens/s against the number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gptscale.common.settings.run_config import MODEL_AXES
from gptscale.foresight.memory.report import COLOURS, stack
from gptscale.foresight.plan.rows import PlannedRow, Split
from gptscale.foresight.plan.trials import RECORDED
from gptscale.foresight.price.picture import draw_step, lanes, letters
from gptscale.results.render import subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_row(row: PlannedRow) -> Figure:
    """Draw when each stream of a simulated row works, and what fills its memory over a step."""
    assert row.simulated is not None
    n_lanes = len(lanes(row.timing.replayed))
    size = (13, max(4.0, 1.6 + 0.34 * n_lanes))
    step = f"{row.timing.seconds * 1e3:,.0f} ms a step ({row.timing.grade}){_left_out(row)}"
    title = f"{row.name}, micro-batches {row.detail}, on {row.cluster}: {step}"
    figure, axes = subplots(1, 2, size, title, gridspec_kw={"width_ratios": [5, 2]})
    gantt, memory = axes[0]
    draw_step(gantt, row.timing.replayed)
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
    first = max(by_devices[counts[0]] for by_devices in speeds.values() if counts[0] in by_devices)
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
    first = f"{row.name}, micro-batches {row.detail}: {1e3 * row.timing.seconds:,.1f} ms{_left_out(row)}"
    return [first, *letters(row.timing.replayed)]


def _left_out(row: PlannedRow) -> str:
    """Return which micro-batches are not drawn, because each further one takes as long as the one before."""
    run = row.run
    n = run.batch.grad_accum_steps
    return f"; drawn are {RECORDED} of {n} micro-batches" if run.pp_size == 1 and n > RECORDED else ""


def scaling_speeds(plans: Mapping[int, Sequence[PlannedRow]]) -> dict[str, dict[int, float]]:
    """Return tokens/s by devices of the splits that are best on most devices. plans: best rows by devices."""
    last = plans[max(plans)]

    def label(row: PlannedRow) -> Split:
        run = row.run
        # A pipeline or tensor recipe spreads over all devices, so its sizes change with them.
        return (run.recipe, *[0] * len(MODEL_AXES)) if run.batch.dp_size == 1 else row.split

    speeds: dict[str, dict[int, float]] = {}
    for chosen in last[:5]:
        name = chosen.run.recipe
        name += "".join(f" {axis}{size}" for axis, size in zip(MODEL_AXES, label(chosen)[1:], strict=True) if size > 1)
        for devices, rows in sorted(plans.items()):
            same = [row.tokens_per_s for row in rows if label(row) == label(chosen)]
            if same:
                speeds.setdefault(name, {})[devices] = max(same)
    return speeds
