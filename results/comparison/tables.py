"""A comparison as a table: for the terminal, Markdown, LaTeX and the HTML page, and with bare figures as CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from gptscale.common.settings.run_config import AXIS_SIZES
from gptscale.results.columns import SUMMARY, cell, csv_line
from gptscale.results.comparison.groups import FIGURES, Comparison, Group
from gptscale.results.comparison.memory_bars import state_gib, state_text, state_unit
from gptscale.results.render import table

if TYPE_CHECKING:
    from rich.console import Console

# Columns that are left out where no group has such a figure.
OPTIONAL = ("time s", "TFLOP/s", "MFU", "GPU %", "bits/byte", "bound by")
# Columns of words, which are flush left. Figures are flush right.
LEFT = ("recipe", "bound by", "status")
# Columns that a narrow terminal does not show, the first of them first.
SPARE = ("p10-p90", "TFLOP/s", "time s", "runs", "GPU %", "MFU", "bits/byte", "loss", "step ms")
IDENTITY = ["recipe", "world_size", "dp_size", *AXIS_SIZES]
IDENTITY += "micro_batch_size grad_accum_steps device workload_hash".split()


def cells(comparison: Comparison) -> list[dict[str, str]]:
    """Return a row of cells for people per group, with the titles as keys, ranked groups first."""
    baseline = comparison.baseline
    base = baseline.median("tokens_per_s") if baseline else None
    groups = comparison.ranked + comparison.apart
    on_device = any(group.median("peak_mem_allocated_gib") is not None for group in groups)
    memory = "peak_mem_allocated_gib" if on_device else "peak_rss_gib"
    unit, scale = state_unit(groups)
    bases = [base if group in comparison.ranked or group.is_technique else None for group in groups]
    rows = [_cells(group, memory, (f"state {unit}", scale), b) for group, b in zip(groups, bases, strict=True)]
    # On a CPU the resident set says little beside the state, because it is nearly the same for every recipe.
    unwanted = {SUMMARY["peak_rss_gib"].title if any(state_gib(group) for group in groups) else f"state {unit}"}
    unwanted |= {title for title in OPTIONAL if all(row[title] == "-" for row in rows)}
    return [{title: text for title, text in row.items() if title not in unwanted} for row in rows]


def _cells(group: Group, memory: str, state: tuple[str, float], base: float | None) -> dict[str, str]:
    tokens = group.median("tokens_per_s")
    p10, p90 = group.median("step_time_s_p10"), group.median("step_time_s_p90")
    return {
        "recipe": group.name,
        "runs": str(len(group.rows)),
        **_shown(group, "tokens_per_s"),
        "speed-up": f"{tokens / base:.2f}x" if tokens and base else "-",
        **_shown(group, "train_time_s", "step_time_s_median"),
        "p10-p90": f"{p10 * 1e3:,.1f}-{p90 * 1e3:,.1f}" if p10 is not None and p90 is not None else "-",
        **_shown(group, "tflops_per_device", "mfu", "gpu_util_percent"),
        state[0]: state_text(group, state[1]),
        **_shown(group, memory, "loss_last", "bits_per_byte"),
        "bound by": _bound_by(group),
        "status": _status(group),
    }


def _shown(group: Group, *names: str) -> dict[str, str]:
    """Return the medians of columns as their rows say that they are shown, by their titles."""
    return {SUMMARY[name].title: SUMMARY[name].shown(group.median(name)) for name in names}


def _bound_by(group: Group) -> str:
    """Return what most runs of a group are bound by, with the gain if it were removed, a dash without a verdict."""
    words = Counter(row["bound_by"] for row in group.rows if row["bound_by"]).most_common(1)
    gain = group.median("gain_if_removed")
    return f"{words[0][0]}{f' -{gain:.0%}' if gain else ''}" if words else "-"


def _status(group: Group) -> str:
    """Return each status, with its count if the runs ended differently: `ok`, `2 ok 1 oom`."""
    counts = group.statuses
    statuses = " ".join(status if len(counts) == 1 else f"{n} {status}" for status, n in counts.items())
    return statuses + " contended" * group.contended + " imported" * bool(group.first["imported_from"])


def notes(comparison: Comparison) -> list[str]:
    """Return the sentences that stand below the table: ties, costs of offload, idle pipelines, errors."""
    lines = []
    if len(comparison.ranked) > 1 and (baseline := comparison.baseline) and baseline.recipe != "single":
        lines.append(f"speed-up: beside {baseline.name}, the first of this work, because there is no run of single")
    lines += _tiers(comparison.ranked)
    lines += [f"{group.name}: {cost}" for group in comparison.ranked for cost in _costs(group)]
    return lines + [f"{group.name}: {note}" for group in comparison.ranked + comparison.apart for note in group.notes]


def _tiers(ranked: Sequence[Group]) -> list[str]:
    """Return a sentence that names the groups of each tier of speed, none if every group differs from the next."""
    tiers: dict[int, list[str]] = {}
    for group in ranked:
        if group.tier:
            tiers.setdefault(group.tier, []).append(group.name)
    if len(tiers) == sum(map(len, tiers.values())):
        return []
    told = "; ".join(f"{tier}. {', '.join(names)}" for tier, names in tiers.items())
    return [f"tiers of speed (the spread of each reaches into that of the first of its tier): {told}"]


def _costs(group: Group) -> Iterator[str]:
    """Yield remarks on the time that a group lost (to others, to offloaded state, to idle stages) and on its plan."""
    if group.contended:
        yield f"contended and not ranked, others took {group.median('taken_fraction'):.0%} of the machine"
    waiting = group.median("offload_wait_fraction")
    if waiting is not None:
        yield f"{waiting:.1%} of the step waiting for what is on the host or on disk"
    idle, theory = group.median("bubble_fraction"), group.median("bubble_fraction_theory")
    if idle is not None and theory is not None:
        yield f"pipeline idle {idle:.1%} of the time, its schedule alone would be {theory:.1%}"
    predictions = (
        ("step", "predicted_step_time_s", "step_time_s_median", 1e3, ",.1f", "ms"),
        ("peak memory", "predicted_peak_mem_gib", "peak_mem_allocated_gib", 1.0, ".2f", "GiB"),
    )
    parts = []
    for what, predicted_column, measured_column, scale, form, unit in predictions:
        predicted, measured = group.median(predicted_column), group.median(measured_column)
        if predicted and measured:
            figures = f"{predicted * scale:{form}} {unit} predicted, {measured * scale:{form}} measured"
            parts.append(f"{what} {figures} ({predicted / measured - 1:+.1%})")
    if parts:
        yield "; ".join(parts)


def show(comparison: Comparison, terminal: Console) -> None:
    """Print the table and its notes, where text from a CSV is never read as markup.

    Words are wrapped between words. Where that is not enough, the columns SPARE are left out one by one.
    """
    from rich.text import Text

    rows, left_out = cells(comparison), []
    for title in SPARE:
        if title in rows[0] and sum(_width(rows, each) + 1 for each in rows[0]) > terminal.width:
            left_out.append(title)
            rows = [{name: text for name, text in row.items() if name != title} for row in rows]
    figures = [title for title in rows[0] if title not in LEFT]
    printed = table(list(rows[0]), left=LEFT, no_wrap=figures, padding=(0, 1, 0, 0))
    for column, title in zip(printed.columns, rows[0], strict=True):
        column.min_width = _width(rows, title)
    for i, row in enumerate(rows):
        style = "dim" if i >= len(comparison.ranked) else "" if "ok" in row["status"] else "red"
        printed.add_row(*(Text(text) for text in row.values()), style=style)
    terminal.print(printed)
    said = notes(comparison)
    if left_out:
        said.append(f"not shown in {terminal.width} columns, but in the files: {', '.join(left_out)}")
    for note in said:
        terminal.print(f"note: {note}", style="yellow", markup=False, highlight=False)


def _width(rows: Sequence[dict[str, str]], title: str) -> int:
    """Return the least width of a column whose words may stand on lines of their own."""
    texts = [title, *(row[title] for row in rows)]
    return max(len(part) for text in texts for part in (text.split() if title in LEFT else [text]))


def as_text(comparison: Comparison, form: Callable[..., str]) -> str:
    """Return the table with its notes in a form of render.py: markdown or booktabs."""
    return form(cells(comparison), left=LEFT, notes=notes(comparison))


def as_csv(comparison: Comparison) -> bytes:
    """Return a CSV line per group with bare figures: medians over the runs that succeeded, lowest and highest tokens/s."""
    base = comparison.baseline.median("tokens_per_s") if comparison.baseline else None
    titles = "name ranked runs status bound_by relative_speed tier tokens_per_s_low tokens_per_s_high".split()
    lines = [csv_line([*titles, *IDENTITY, *FIGURES, "notes"])]
    for i, group in enumerate(comparison.ranked + comparison.apart):
        ranked, tokens = i < len(comparison.ranked), group.median("tokens_per_s")
        relative = tokens / base if (ranked or group.is_technique) and tokens and base else None
        words = [group.name, ranked, len(group.rows), _status(group), _bound_by(group), relative, group.tier]
        words += [*(group.spread or (None, None)), *(group.first[column] for column in IDENTITY)]
        words += [*map(group.median, FIGURES), "; ".join(group.notes)]
        lines.append(csv_line(cell(word) for word in words))
    return b"".join(lines)
