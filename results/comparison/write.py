"""Writing a comparison: to the terminal, and as CSV, Markdown, PNG and HTML files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gptscale.results.comparison.groups import Comparison, compare, load
from gptscale.results.comparison.tables import as_csv, as_markdown, show
from gptscale.results.render import console


def write_comparison(paths: Sequence[Path], out: Path) -> None:
    """Compare the newest run with those of its work, print that, and leave comparison.{csv,md,png,html} in `out`."""
    rows = load(paths)
    files = {kind: out / f"comparison.{kind}" for kind in ("csv", "md", "png", "html")}
    write(compare(rows, rows.workload_hash.iloc[-1]), **files)


def write(
    comparison: Comparison,
    *,
    csv: Path | None = None,
    md: Path | None = None,
    png: Path | None = None,
    html: Path | None = None,
) -> None:
    """Print the comparison and write the files that are named."""
    terminal = console(log_columns=100)
    show(comparison, terminal)
    if csv:
        csv.write_bytes(as_csv(comparison))
    if md:
        md.write_text(as_markdown(comparison))
    if png or html:
        from gptscale.results.comparison.page import page
        from gptscale.results.comparison.picture import figure_png

        picture = figure_png(comparison)
        if png:
            png.write_bytes(picture)
        if html:
            html.write_text(page(comparison, picture))
    for path in (csv, md, png, html):
        if path:
            terminal.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
