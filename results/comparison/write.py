"""Writing a comparison: to the terminal, and as CSV, Markdown, PNG and HTML files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from gptscale.common.errors import StorageError, visible
from gptscale.results.comparison.groups import Comparison, compare
from gptscale.results.comparison.read import DAMAGED, load
from gptscale.results.comparison.tables import as_csv, as_markdown, show
from gptscale.results.record.files import as_storage_error
from gptscale.results.render import console


def write_comparison(paths: Sequence[Path], out: Path) -> None:
    """Compare the newest run with those of its work, print that, and leave comparison.{csv,md,png,html} in `out`."""
    rows = load(paths)
    works = [row["workload_hash"] for row in rows if row["status"] != DAMAGED]
    files = {kind: out / f"comparison.{kind}" for kind in ("csv", "md", "png", "html")}
    for file in files.values():
        # A link may be another user's, and is not followed.
        if file.is_symlink():
            raise StorageError(f"{file} is a symbolic link", "in --out", "remove it or choose another folder")
    write(compare(rows, works[-1] if works else None), **files)


def write(
    comparison: Comparison,
    *,
    csv: Path | None = None,
    md: Path | None = None,
    png: Path | None = None,
    html: Path | None = None,
) -> None:
    """Print the comparison and write the files that are named.

    The files are private to the user. Raises StorageError if the disk is full.
    """
    picture = b""
    if png or html:
        from gptscale.results.comparison.page import page
        from gptscale.results.comparison.picture import figure_png

        # First, because the notes also tell what is wrong with the steps of a run.
        picture = figure_png(comparison)
    terminal = console(log_columns=130)
    show(comparison, terminal)
    forms: list[tuple[Path | None, Callable[[], bytes]]] = [
        (csv, lambda: as_csv(comparison)),
        (md, lambda: as_markdown(comparison).encode()),
        (png, lambda: picture),
        (html, lambda: page(comparison, picture).encode()),
    ]
    for path, form in forms:
        if path:
            content = form()
            try:
                with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                    file.write(content)
            except OSError as error:
                raise as_storage_error(error, path) from None
            terminal.print(f"wrote {visible(str(path))}", highlight=False, markup=False, soft_wrap=True)
