"""`gptscale lenet report`: one page with every figure of the exercise and the four reports beside ours.

It is made of CSVs alone: the committed ones, or those of a reader's own results folder. A table whose rows are missing says so.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptscale.common.errors import ConfigError, GptscaleError, visible
from gptscale.common.settings.command_line import parse
from gptscale.lenet.comparison.tables import Column
from gptscale.results.render import DPI, markdown

if TYPE_CHECKING:
    import pandas as pd

    from gptscale.lenet.comparison.rows import MeasuredRows

# Titles of columns of words.
LEFT = ("what", "strategy", "question", "CSV", "device", "torch")


@dataclass(frozen=True)
class ReportOptions:
    """Where the rows are, and where the pages go."""

    results: Path = Path(str(files("gptscale.results"))) / "measured"
    """A results folder: lenet.csv with runs/, and what commands wrote by --csv. Default: the committed rows of a clone."""
    out: Path = Path("report")
    """Folder for report.html, which has the pictures too, and report.md."""

    def __post_init__(self) -> None:
        if not self.results.is_dir():
            fix = "give a results folder, or work in a clone, which has rows of its own"
            raise ConfigError(f"{visible(str(self.results))} is no folder", "in --results", fix)


def main(argv: Sequence[str]) -> int:
    """Read the rows, write both pages, and say how many tables have none."""
    options = parse(ReportOptions, argv, prog="gptscale lenet report", about="The old figures beside ours.")
    used: dict[str, pd.DataFrame] = {}
    import jinja2

    from gptscale.lenet.comparison.answers import ANSWERS, lines_of

    tables = [table for section in ANSWERS["sections"] for table in section["tables"]]
    for table in tables:
        table["lines"] = lines_of(table, fill(table, options.results, used))
    parts = ANSWERS | {"files": [machine(file, used[file]) for file in sorted(used)], "left": LEFT}
    parts["glance"] = [glance(section) for section in ANSWERS["sections"]]
    template = files("gptscale.lenet.comparison").joinpath("answers.html").read_text()
    html = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(template).render(parts)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in (("report.html", html), ("report.md", as_markdown(parts))):
        (options.out / name).write_text(text)
        print(f"wrote {visible(str(options.out / name))}")
    print(f"note: {sum(bool(table['missing']) for table in tables)} of {len(tables)} tables have no rows")
    return 0


def fill(table: dict[str, Any], folder: Path, used: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of a table, and add the names of its CSVs, its picture and what is missing to it."""
    import pandas as pd

    from gptscale.lenet.comparison.answers import read

    table |= {"files": [], "missing": "", "png": ""}
    try:
        frame, measured, table["files"] = read(table, folder)
    except GptscaleError as error:
        # The cells of a table without a committed CSV say that it waits.
        table["missing"] = error.what * bool(table["csv"])
        return pd.DataFrame()
    try:
        table["png"] = base64.b64encode(picture(table, frame, measured)).decode() if "draw" in table else ""
    except (AttributeError, KeyError, ValueError) as error:
        table["missing"] = f"the picture, for {table['files'][0]} is of another version ({str(error)[:80]})"
    used |= dict.fromkeys(table["files"], frame)
    return frame


def picture(table: dict[str, Any], frame: pd.DataFrame, measured: MeasuredRows | None) -> bytes:
    """Return the picture of a table as a PNG, from the same rows: that of its study if there is one."""
    file: Any = io.BytesIO()
    if measured is not None:
        from gptscale.lenet.studies.study import StudyResult

        study = import_module(f"gptscale.lenet.studies.{table['study']}").STUDY
        result = StudyResult(study.options(), measured)
        study.draw(result, study.title(result), file)
    elif "study" in table:
        import_module(f"gptscale.lenet.studies.{table['study']}").draw(frame, file)
    else:
        # The bars of a comparison of GPTs.
        from gptscale.lenet.comparison import figures

        groups = {str(name): rows for name, rows in frame.groupby("name", sort=False)}
        figure, (panels,) = figures.grid([3], [1.6 + 0.3 * len(groups)], 15.0, "the same tokens by each strategy")
        for panel, title in zip(panels, ("tokens/s", "GFLOP/s of a device", "state on its device, MiB"), strict=True):
            name, factor, form = table["figures"][title]
            figures.bars(panel, groups, [Column(title, name, form, factor)], title)
        figure.savefig(file, dpi=DPI)
    return bytes(file.getvalue())


def glance(section: dict[str, Any]) -> dict[str, str]:
    """Return a line about a section: the figure that it names first, and how many of its cells wait for a GPU."""
    every = [line for table in section["tables"] for line in table["lines"]]
    first: dict[str, str] = next((line for line in every if section["first"] in line.values()), {})
    waiting = sum(line.get("ours", "").startswith("waits") for line in every)
    cells = {key: first.get(key, "-") for key in ("what", "old", "ours", "ours / old")}
    return {"question": section["title"]} | cells | {"cells that wait": str(waiting or "-")}


def machine(file: str, frame: pd.DataFrame) -> dict[str, str]:
    """Return a line about a CSV with its device, its threads and its version of torch."""
    names = {"device": "device", "threads": "threads", "torch": "torch_version"}
    known = {title: frame[name].dropna().unique() for title, name in names.items() if name in frame}
    return {"CSV": file} | dict.fromkeys(names, "-") | {title: ", ".join(map(str, k)) for title, k in known.items()}


def as_markdown(parts: dict[str, Any]) -> str:
    """Return the page as Markdown, without pictures."""
    blocks = [f"# {parts['title']}", parts["about"], markdown(parts["glance"], left=LEFT)]
    for section in parts["sections"]:
        blocks += [f"## {section['title']}", section["asked"], f"More: [{section['page']}]({section['page']})."]
        for table in section["tables"]:
            blocks += [f"### {table['caption']}", f"    {table['command']}"]
            blocks += [markdown(lines, left=LEFT) for lines in [table["lines"]] if lines]
            blocks += [f"Missing: {table['missing']}"] * bool(table["missing"])
            blocks += [f"CSV: {', '.join(f'`{name}`' for name in table['files'])}."] * bool(table["files"])
    blocks += [f"## {parts['where']}", *(markdown(lines, left=LEFT) for lines in [parts["files"]] if lines)]
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"
