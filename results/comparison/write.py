"""Writing a comparison: to the terminal, and as CSV, Markdown, LaTeX, pictures and HTML files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gptscale.common.errors import StorageError, visible
from gptscale.results.comparison.groups import Comparison, compare
from gptscale.results.comparison.read import DAMAGED, load
from gptscale.results.comparison.tables import as_csv, as_text, show
from gptscale.results.record.files import export
from gptscale.results.render import PICTURES, booktabs, console, markdown, picture_bytes

if TYPE_CHECKING:
    from gptscale.results.comparison.picture import Drawing


def write_comparison(paths: Sequence[Path], out: Path) -> None:
    """Compare the newest run with those of its work, print that, and leave comparison.{csv,md,png,html} in `out`."""
    rows = load(paths)
    works = [row["workload_hash"] for row in rows if row["status"] != DAMAGED]
    files = {kind: out / f"comparison.{kind}" for kind in ("csv", "md", "png", "html")}
    for file in files.values():
        # A link may be another user's, and is not followed.
        if file.is_symlink():
            raise StorageError(f"{file} is a symbolic link", "in --out", "remove it or choose another folder")
    write(compare(rows, works[-1] if works else None), files)


def write(comparison: Comparison, files: Mapping[str, Path], panel: str | None = None) -> None:
    """Print the comparison and write the files, whose keys say their kinds: csv, md, tex, html or one of PICTURES.

    panel: the only one that pictures show, None for all. Raises ConfigError if there is no such panel, and StorageError if a
    file cannot be written.
    """
    drawing = None
    if not files.keys().isdisjoint((*PICTURES, "html")):
        from gptscale.results.comparison.picture import Drawing

        # First, because the notes also tell what is wrong with the steps of a run.
        drawing = Drawing(comparison)
    # Nothing is written before all is known to be there.
    contents = {kind: _content(kind, comparison, drawing, panel) for kind in files}
    terminal = console(log_columns=130)
    show(comparison, terminal)
    for kind, path in files.items():
        export(path, contents[kind])
        terminal.print(f"wrote {visible(str(path))}", highlight=False, soft_wrap=True)


def _content(kind: str, comparison: Comparison, drawing: Drawing | None, panel: str | None) -> bytes:
    if kind == "csv":
        return as_csv(comparison)
    if kind in ("md", "tex"):
        return as_text(comparison, markdown if kind == "md" else booktabs).encode()
    assert drawing is not None
    if kind == "html":
        from gptscale.results.comparison.page import page

        return page(comparison, {name: picture_bytes(drawing.panel(name)) for name in drawing.panels}).encode()
    return picture_bytes(drawing.panel(panel) if panel else drawing.figure(), kind)
