"""A comparison as a table: for the terminal, Markdown and the HTML page, and with bare figures as CSV."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from gptscale.results.comparison.groups import Comparison, Group
from gptscale.results.comparison.memory_bars import state_gib, state_text, state_unit
from gptscale.results.comparison.rows import FIGURES
from gptscale.results.record.columns import cell
from gptscale.results.record.files import csv_line
from gptscale.results.record.summary import as_size
from gptscale.results.render import markdown, table

if TYPE_CHECKING:
    from rich.console import Console

# Columns that are left out where no group has such a figure.
OPTIONAL = ("time s", "MFU", "GPU %", "bound by")
# Columns of words, which are flush left. Figures are flush right.
LEFT = ("recipe", "bound by", "status")
IDENTITY = "recipe world_size dp_size tp_size pp_size micro_batch_size grad_accum_steps device workload_hash".split()


def cells(comparison: Comparison) -> list[dict[str, str]]:
    """Return a row of cells for people per group, with the titles as keys, ranked groups first."""
    baseline = comparison.baseline
    base = baseline.median("tokens_per_s") if baseline else None
    groups = comparison.ranked + comparison.apart
    on_device = any(group.median("peak_mem_allocated_gib") is not None for group in groups)
    memory = ("peak GiB", "peak_mem_allocated_gib") if on_device else ("host GiB", "peak_rss_gib")
    n_ranked = len(comparison.ranked)
    unit, scale = state_unit(groups)
    bases = [base if i < n_ranked else None for i in range(len(groups))]
    rows = [_cells(group, memory, (f"state {unit}", scale), b) for group, b in zip(groups, bases, strict=True)]
    # On a CPU the resident set says little beside the state, because it is nearly the same for every recipe.
    unwanted = {"host GiB" if any(state_gib(group) for group in groups) else f"state {unit}"}
    unwanted |= {title for title in OPTIONAL if all(row[title] == "-" for row in rows)}
    return [{title: text for title, text in row.items() if title not in unwanted} for row in rows]


def _cells(group: Group, memory: tuple[str, str], state: tuple[str, float], base: float | None) -> dict[str, str]:
    tokens = group.median("tokens_per_s")
    p10, p90 = group.median("step_time_s_p10"), group.median("step_time_s_p90")
    return {
        "recipe": group.name,
        "runs": str(len(group.rows)),
        "tokens/s": _shown(tokens, ",.0f"),
        "speed-up": _shown(tokens / base if tokens and base else None, ".2f", "x"),
        "time s": _shown(group.median("train_time_s"), ",.1f"),
        "step ms": _shown(group.median("step_time_s_median"), ",.1f", scale=1e3),
        "p10-p90": f"{p10 * 1e3:,.1f}-{p90 * 1e3:,.1f}" if p10 is not None and p90 is not None else "-",
        "MFU": _shown(group.median("mfu"), ".1%"),
        "GPU %": _shown(group.median("gpu_util_percent"), ".0f"),
        state[0]: state_text(group, state[1]),
        memory[0]: _shown(group.median(memory[1]), ".2f"),
        "loss": _shown(group.median("loss_last"), ".5f"),
        "bound by": _bound_by(group),
        "status": _status(group),
    }


def _shown(value: float | None, form: str, unit: str = "", *, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:{form}}{unit}"


def _bound_by(group: Group) -> str:
    """Return what most runs of a group are bound by, with the gain if it were removed, a dash without a verdict."""
    words = Counter(word for word in group.rows["bound_by"] if word).most_common(1)
    gain = group.median("gain_if_removed")
    return f"{words[0][0]}{f' -{gain:.0%}' if gain else ''}" if words else "-"


def _status(group: Group) -> str:
    """Return each status, with its count if the runs ended differently: `ok`, `2 ok 1 oom`."""
    counts = group.statuses
    statuses = " ".join(status if len(counts) == 1 else f"{n} {status}" for status, n in counts.items())
    return f"{statuses} contended" if group.contended else statuses


def notes(comparison: Comparison) -> list[str]:
    """Return the sentences that stand below the table: ties, costs of offload, idle pipelines, errors."""
    chains: list[list[str]] = []
    for group in comparison.ranked:
        if group.tied_with_faster:
            chains[-1].append(group.name)
        else:
            chains.append([group.name])
    ties = [" ~ ".join(chain) for chain in chains if len(chain) > 1]
    lines = []
    if len(comparison.ranked) > 1 and (baseline := comparison.baseline) and baseline.recipe != "single":
        lines.append(f"speed-up: beside {baseline.name}, the first of this work, because there is no run of single")
    lines += [f"no significant difference between neighbours, their spreads overlap: {tie}" for tie in ties]
    lines += [
        f"{group.name}: contended, others took {group.median('taken_fraction'):.0%} of the machine while it was timed"
        for group in comparison.ranked
        if group.contended
    ]
    lines += [f"{group.name}: {offload}" for group in comparison.ranked if (offload := _offload(group))]
    lines += [f"{group.name}: {bubble}" for group in comparison.ranked if (bubble := _bubble(group))]
    lines += [f"{group.name}: {planned}" for group in comparison.ranked if (planned := _planned(group))]
    return lines + [f"{group.name}: {note}" for group in comparison.ranked + comparison.apart for note in group.notes]


def _offload(group: Group) -> str:
    """Say where state lives off the device and what that costs, or nothing if all is on the device."""
    stores = [(name, group.median(f"offload_{column}_gib")) for name, column in (("the host", "cpu"), ("disk", "disk"))]
    waiting = group.median("offload_wait_fraction")
    if waiting is None:
        return ""
    places = " and ".join(f"{as_size(gib)} on {name}" for name, gib in stores if gib)
    return f"keeps {places}, {waiting:.1%} of the step waiting for it"


def _planned(group: Group) -> str:
    """Say what a plan predicted beside what was measured, or nothing without a plan."""
    pairs = (
        ("step", "predicted_step_time_s", "step_time_s_median", 1e3, ",.1f", "ms"),
        ("peak memory", "predicted_peak_mem_gib", "peak_mem_allocated_gib", 1.0, ".2f", "GiB"),
    )
    parts = []
    for what, predicted_column, measured_column, scale, form, unit in pairs:
        predicted, measured = group.median(predicted_column), group.median(measured_column)
        if predicted and measured:
            figures = f"{predicted * scale:{form}} {unit} predicted, {measured * scale:{form}} measured"
            parts.append(f"{what} {figures} ({predicted / measured - 1:+.1%})")
    return "; ".join(parts)


def _bubble(group: Group) -> str:
    """Say how much of its time a pipeline computed nothing, or nothing without stages."""
    measured, theory = group.median("bubble_fraction"), group.median("bubble_fraction_theory")
    if measured is None or theory is None:
        return ""
    return f"pipeline idle {measured:.1%} of the time, its schedule alone would be {theory:.1%}"


def show(comparison: Comparison, terminal: Console) -> None:
    """Print the table and its notes, where text from a CSV is never read as markup."""
    from rich.text import Text

    rows = cells(comparison)
    figures = [title for title in rows[0] if title not in LEFT]
    printed = table(list(rows[0]), left=LEFT, no_wrap=figures, padding=(0, 1, 0, 0))
    for i, row in enumerate(rows):
        style = "" if "ok" in row["status"] else "red"
        if i >= len(comparison.ranked):
            style = "dim"
        printed.add_row(*(Text(text) for text in row.values()), style=style)
    terminal.print(printed)
    for note in notes(comparison):
        terminal.print(f"note: {note}", style="yellow", markup=False, highlight=False)


def as_markdown(comparison: Comparison) -> str:
    """Return the table as Markdown, with the notes below it."""
    return markdown(cells(comparison), left=LEFT, notes=notes(comparison))


def as_csv(comparison: Comparison) -> bytes:
    """Return a CSV line per group with bare figures: medians over the runs that succeeded, lowest and highest tokens/s."""
    base = comparison.baseline.median("tokens_per_s") if comparison.baseline else None
    titles = (
        "name ranked runs status bound_by relative_speed tied_with_faster tokens_per_s_low tokens_per_s_high".split()
    )
    lines = [csv_line([*titles, *IDENTITY, *FIGURES, "notes"])]
    for i, group in enumerate(comparison.ranked + comparison.apart):
        ranked, tokens = i < len(comparison.ranked), group.median("tokens_per_s")
        relative = tokens / base if ranked and tokens and base else None
        words = [
            group.name,
            ranked,
            len(group.rows),
            _status(group),
            _bound_by(group),
            relative,
            group.tied_with_faster,
        ]
        words += [
            *(group.spread or (None, None)),
            *(group.first[column] for column in IDENTITY),
            *(group.median(column) for column in FIGURES),
            "; ".join(group.notes),
        ]
        lines.append(csv_line(cell(word) for word in words))
    return b"".join(lines)
