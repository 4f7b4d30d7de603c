"""The bars of a comparison's picture that show memory: a rank's state by kind, beside its recipe's formula."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gptscale.common.recipe_config import LETTERS
from gptscale.results.comparison.groups import Group
from gptscale.results.record.summary import as_size
from gptscale.results.render import legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A kind or a place of state, as the columns of summary.csv have it: its name, colour and hatching.
PARTS = {
    "weights": ("weights", "#0072B2", ""),
    "gradients": ("gradients", "#E69F00", ""),
    "optimizer": ("optimizer state", "#009E73", ""),
    "host": ("moved to the host", "#CCCCCC", "///"),
    "disk": ("moved to disk", "#888888", "xxx"),
}
# So many letters are as wide as the panel alone, and as the panel of the whole picture.
LETTERS_ALONE, LETTERS_WIDE = 58, 78
REST = ("activations and buffers at the peak", "#F2F2F2")


def state_gib(group: Group) -> dict[str, float]:
    """Return the GiB of each part of a group's state, none if it was not measured."""
    parts = {place: group.median(f"state_{place}_gib") for place in PARTS}
    return {place: gib for place, gib in parts.items() if gib is not None}


def state_unit(groups: Sequence[Group]) -> tuple[str, float]:
    """Return the unit in which to show the state of groups, and how many of them a GiB is."""
    most = max((sum(state_gib(group).values()) for group in groups), default=0.0)
    return ("GiB", 1.0) if most >= 1 else ("MiB", 1024.0)


def state_text(group: Group, scale: float) -> str:
    """Return the state on the device, and what is elsewhere, as short as a cell of a table is."""
    parts = {place: gib * scale for place, gib in state_gib(group).items()}
    if not parts:
        return "-"
    on_device = sum(size for place, size in parts.items() if place not in ("host", "disk"))
    elsewhere = [f"{parts[place]:,.2f} {place}" for place in ("host", "disk") if parts.get(place)]
    return " + ".join([f"{on_device:,.2f}", *elsewhere])


def draw_memory(axis: Axes, groups: Sequence[Group], colours: Sequence[str], alone: bool) -> None:
    """Draw what one device holds: state by kind beside its formula, or the peak of a process where no state was measured."""
    on_device = any(group.median("peak_mem_allocated_gib") is not None for group in groups)
    peak = "peak_mem_allocated_gib" if on_device else "peak_rss_gib"
    reach, texts = [_reach(group, peak, on_device) for group in groups], [_texts(group, peak) for group in groups]
    # A bar ends where there is room for its text.
    width = LETTERS_ALONE if alone else LETTERS_WIDE
    right = max(
        (x / (1 - min(0.75, (len("".join(text)) + 4) / width)) for x, text in zip(reach, texts, strict=True)),
        default=0.0,
    )
    unit, scale = ("GiB", 1.0) if max(reach, default=0.0) >= 1 else ("MiB", 1024.0)
    with_state = any(state_gib(group) for group in groups)
    for i, (group, (size, formula)) in enumerate(zip(groups, texts, strict=True)):
        if state_gib(group):
            _draw_state(axis, i, group, scale, peak if on_device else "")
        else:
            axis.barh(i, (group.median(peak) or 0.0) * scale, color="#BBBBBB" if with_state else colours[i], alpha=0.85)
        at = (reach[i] + 0.01 * right) * scale
        axis.annotate(size, (at, i), va="center", fontsize=9)
        place: dict[str, Any] = {"xytext": (len(size) * 6 + 6, 0), "textcoords": "offset points"}
        axis.annotate(formula, (at, i), va="center", fontsize=8, color="#555555", **place)
    peak_of_rank = f"peak {'device' if on_device else 'host'} memory of a rank"
    what = "state of one rank, and its formula" if with_state else peak_of_rank
    axis.set(title=what, xlabel=unit, xlim=(0, (right or 1.0) * scale))
    used = {letter for _, formula in texts for letter in re.findall("[A-Za-z]", formula)}
    for letter, meaning in LETTERS.items():
        if letter in used:
            axis.barh(0, 0.0, color="none", label=f"{letter}: {meaning}")
    if with_state:
        legend_below(axis, columns=1 if alone else 2)


def _draw_state(axis: Axes, i: int, group: Group, scale: float, peak: str) -> None:
    """Draw the parts of a state one after another, then the rest of the device's peak, and a mark where the formula ends."""
    begin = on_device = 0.0
    for place, gib in state_gib(group).items():
        name, colour, hatch = PARTS[place]
        if gib:
            style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            axis.barh(i, gib * scale, left=begin * scale, label=name, **style)
        begin += gib
        on_device = begin if place not in ("host", "disk") else on_device
    if peak and (rest := (group.median(peak) or 0.0) - on_device) > 0:
        axis.barh(i, rest * scale, left=begin * scale, color=REST[1], edgecolor="#999999", linewidth=0.5, label=REST[0])
    if formula := group.median("state_formula_gib"):
        axis.plot([formula * scale] * 2, (i - 0.45, i + 0.45), color="black", linewidth=2.0, label="formula")


def _reach(group: Group, peak: str, on_device: bool) -> float:
    """Return where the bar of a group and its mark end, in GiB."""
    parts = state_gib(group)
    elsewhere = parts.get("host", 0.0) + parts.get("disk", 0.0)
    of_kinds = max(sum(parts.values()), group.median("state_formula_gib") or 0.0)
    return max(of_kinds, (group.median(peak) or 0.0) + elsewhere) if on_device or not parts else of_kinds


def _texts(group: Group, peak: str) -> tuple[str, str]:
    """Return what stands behind a bar: its sum, and its formula."""
    parts, gib = state_gib(group), group.median(peak)
    size = as_size(sum(parts.values())) if parts else "-" if gib is None else as_size(gib)
    return size, f"= {group.first['state_formula']}" if parts and group.first["state_formula"] else ""
