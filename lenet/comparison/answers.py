"""The tables of `gptscale lenet report`: each figure of the exercise and the reports beside ours, with their ratio.

answers.json says which rows of which CSV stand beside which old figure. The old figures themselves are in reports.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gptscale.common.errors import ConfigError
from gptscale.lenet.comparison.tables import ROWS, RUNS, Lines, class_accuracies
from gptscale.lenet.run.columns import LENET, read_summary

if TYPE_CHECKING:
    import pandas as pd

    from gptscale.lenet.comparison.rows import MeasuredRows

ANSWERS: dict[str, Any] = json.loads(Path(__file__).with_name("answers.json").read_text())
KERNEL = {"cpp": "a kernel", "loop": "a loop", "windows": "a loop over windows"}


class Line(NamedTuple):
    """A line of a table: what it is about, the old figure, our column, and the rows of ours that count."""

    what: str
    old: float | str
    column: tuple[str, float, str]
    where: dict[str, Any]
    otherwise: str = "no such run"

    def cells(self, frame: pd.DataFrame) -> dict[str, str]:
        """Return the old figure, ours as a median with the lowest and the highest, and ours over the old."""
        name, factor, form = self.column
        for key, value in self.where.items():
            frame = frame[frame[key] == value] if key in frame else frame[:0]
        values: Any = factor * frame[name].dropna() if name in frame and len(frame) else ()
        ours, ratio = self.otherwise, "-"
        if len(values):
            low, median, high = (format(number, form) for number in values.quantile([0, 0.5, 1]))
            ours = median if low == high else f"{median} ({low}-{high})"
            if isinstance(self.old, float) and self.old:
                ratio = f"{values.median() / self.old:.2f}"
        then = format(self.old, form) if isinstance(self.old, float) else self.old
        return {"what": self.what, "old": then, "ours": ours, "ours / old": ratio}


def read(table: dict[str, Any], folder: Path) -> tuple[pd.DataFrame, MeasuredRows | None, list[str]]:
    """Return the rows that a table is made of, the runs that they belong to, and the names of their CSVs.

    They are the committed CSVs if the folder has any, else those of the reader's own runs. Raises ConfigError for none.
    """
    import pandas as pd

    from gptscale.lenet.comparison.rows import read_rows, rows_of_runs

    kind, wanted = table.get("kind", "runs"), [f"{name}.csv" for name in table["csv"]]
    files = [folder / name for name in wanted if (folder / name).is_file()]
    files = files or (sorted(folder.glob(f"{table['own']}*.csv")) if "own" in table else [])
    refused = ConfigError(f"there is no {' and '.join(wanted) or LENET.file}", "in the results", table["command"])
    if kind not in ("runs", "classes", "epochs", "windows"):
        if not files:
            raise refused
        try:
            frames = [_peak(pd.read_csv(file), file) if kind == "peaks" else pd.read_csv(file) for file in files]
        except (ValueError, AttributeError) as error:
            what = f"{files[0].name} is no such table ({str(error)[:80]})"
            raise ConfigError(what, "in the results", table["command"]) from None
        frame = pd.concat(frames, ignore_index=True)
        frame["state"] = frame.filter(regex="^state_(weights|gradients|optimizer)_gib").sum(axis=1)
        return frame, None, [file.name for file in files]
    if files:
        measured = read_rows(",".join(map(str, files)), table["study"])
    elif (folder / LENET.file).is_file():
        runs = read_summary(folder / LENET.file).drop_duplicates("run_id", keep="last")
        measured = rows_of_runs(folder, runs[runs.study == table["study"]].reset_index(drop=True))
    else:
        raise refused
    runs = measured.runs[measured.runs.status == "ok"]
    if runs.empty:
        raise refused
    of_runs = runs.join(class_accuracies(runs).add_prefix("class ")).assign(
        wrong=(1 - runs.test_accuracy) * runs.n_test,
        epoch_s=runs.train_time_s * runs.n_train / runs.steps / runs.batch_size,
    )
    frame = {"epochs": measured.epochs, "windows": measured.windows}.get(kind, of_runs)
    return frame, measured, [file.name for file in files] or [LENET.file]


def _peak(events: pd.DataFrame, file: Path) -> pd.DataFrame:
    """Return a row with the highest sum of living bytes, for a CSV of `gptscale lenet memory` named MODEL-BATCH."""
    model, _, batch = file.stem.removeprefix("memory-").rpartition("-")
    peak = events.live_bytes.max()
    return events[:1].assign(model=model.rpartition("-")[2], batch=int(batch), peak=peak / 2**20, peak_gib=peak / 2**30)


def lines_of(table: dict[str, Any], frame: pd.DataFrame) -> Lines:
    """Return the lines of a table."""
    kind, figures = table.get("kind"), table.get("figures", {}).items()
    if kind == "gpt":
        # The exercise asks for these figures and gives none.
        def ours(name: str, column: Any) -> str:
            return Line("", "", column, {"name": name}, "-").cells(frame)["ours"]

        return [{"strategy": n} | {title: ours(n, c) for title, c in figures} for n in frame.get("name", [])]
    lines = _minigrad if kind == "minigrad" else _reported if "run" in table else _beside
    return [line.cells(frame) for line in lines(table)]


def _beside(table: dict[str, Any]) -> Iterator[Line]:
    """Yield the lines that answers.json lists. An entry has a row of reports.json or a label, which rows, and other words."""
    for label, where, *words in table["beside"]:
        reference = ROWS[table["study"]][label] if isinstance(label, int) else {}
        named = " ".join(list(reference.values())[: 2 if "way" in reference else 1]) or label
        for title, (column, factor, form, *change) in table["figures"].items():
            source, scale, offset = change or (title, 1, 0)
            text = reference.get(source, "" if reference else words[1] if words[1:] else "-")
            number = text.replace(",", "")
            old = scale * float(number) + offset if number.replace(".", "", 1).isdigit() else text
            if text:
                what = f"{named}: {title}" if len(table["figures"]) > 1 else named
                yield Line(what, old, (column, factor, form), where, *words[:1])


def _reported(table: dict[str, Any]) -> Iterator[Line]:
    """Yield the losses of a report's run by epoch, those of each 200 batches, or its accuracies by class."""
    run, kind = RUNS[table["run"]], table["kind"]
    of_variant, words = {"variant": table["variant"]}, table.get("otherwise", "no such run")
    olds = run["by_class"] if kind == "classes" else run["losses"]
    for i, old in enumerate(old for of_epoch in olds for old in of_epoch) if kind == "windows" else enumerate(olds):
        what, column, where = f"digit {i}", (f"class {i}", 100.0, ".2f"), {}
        if kind == "epochs":
            what, column, where = f"epoch {i + 1}", ("train_loss", 1.0, ".4f"), {"epoch": i + 1}
        elif kind == "windows":
            epoch, window = divmod(i, 4)
            what, column = f"epoch {epoch + 1}, to batch {200 * (window + 1)}", ("loss", 1.0, ".3f")
            where = {"epoch": epoch + 1, "window": window}
        yield Line(what, float(old), column, of_variant | where, words)


def _minigrad(table: dict[str, Any]) -> Iterator[Line]:
    """Yield the first and the last epoch of each model, or the milliseconds of one step."""
    from gptscale.lenet.minigrad import report

    if "steps" in table:
        for pooling, theirs in (("loop", report.REPORT_LOOP), ("cpp", report.REPORT_KERNEL)):
            for name, seconds in theirs._asdict().items():
                what = f"{name.removesuffix('_s').replace('_', ' ')}, pooling by {KERNEL[pooling]}"
                yield Line(what, 1e3 * seconds, (name, 1e3, ",.3f"), {"pool_backward": pooling})
        return
    for model, pooling in (("pure_linear", ""), ("simple_conv", ""), ("LeNet", "windows"), ("LeNet", "cpp")):
        run, where = report.report_run(model, pooling), {"pool_backward": pooling} if pooling else {}
        for epoch in (0, len(run) - 1):
            for title, (column, factor, form) in table["figures"].items():
                what = f"{model}{f', pooling by {KERNEL[pooling]}' if pooling else ''}, epoch {epoch + 1}: {title}"
                old = factor * float(run[column][epoch])
                yield Line(what, old, (column, factor, form), where | {"model": model, "epoch": epoch})
