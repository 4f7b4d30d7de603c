"""One self-contained HTML page of a comparison: table, pictures, definitions, and how to repeat each run."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from gptscale.common.recipe_config import LETTERS
from gptscale.results.columns import SUMMARY
from gptscale.results.comparison.groups import Comparison
from gptscale.results.comparison.run_files import read_run_json
from gptscale.results.comparison.tables import cells, notes
from gptscale.results.render import SHARES

# The words and letters of pictures that are no titles of columns.
LEGEND = {f"{letter} in a formula": meaning for letter, meaning in LETTERS.items()} | {
    f"time: {name}": meaning for name, (_, meaning) in SHARES.items()
}
# With more runs the page does not say how each was started.
RUNS_MAX = 1000
# The meaning of the titles of a table: those of columns, and those that a comparison makes.
DEFINITIONS = {column.title: column.doc.replace("`", "") for column in SUMMARY.columns if column.title} | {
    "runs": "repeats of one configuration; every figure is the median over those that succeeded",
    "speed-up": "tokens/s over those of `single`, one device, for the same work; without it, over those of the first run of that work",
    "p10-p90": "10th and 90th percentile of the timed steps, in ms; two runs whose spreads overlap are not told apart",
    "state GiB": "weights, gradients and optimizer state of the rank that holds most, on its device, and what its strategy moved to the host or to disk",
    "bound by": "what limits the speed, and how much shorter a step would be without it (gptscale why)",
    "status": "ok, oom (out of memory), failed, interrupted; damaged: the run's row cannot be read; contended: others took more than 5 % of the machine while it was timed; imported: of another program",
}


def page(comparison: Comparison, pictures: Mapping[str, bytes]) -> str:
    """Return the page as HTML, in which all text is escaped and nothing is fetched from anywhere.

    pictures: PNGs of panels by their names.
    """
    import jinja2

    row = comparison.ranked[0].first
    about = (
        f"{row['model']}, {row['n_params']:,.0f} parameters, sequence {row['seq_len']}, global batch {row['global_batch_size']}, "
        f"{row['steps']} steps, {row['precision']}, data {row['data']}, seed {row['seed']}; {row['device']}; "
        f"torch {row['torch_version']}; workload {row['workload_hash']}."
    )
    rows = cells(comparison)
    text = Path(__file__).with_name("page.html").read_text()
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text)
    keys = {title: title.replace("state MiB", "state GiB") for title in rows[0]}
    return template.render(
        about=about,
        rows=rows,
        n_ranked=len(comparison.ranked),
        notes=notes(comparison),
        pictures={name: base64.b64encode(png).decode() for name, png in pictures.items()},
        definitions={title: DEFINITIONS[key] for title, key in keys.items() if key in DEFINITIONS} | LEGEND,
        runs=_runs(comparison),
    )


def _runs(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return name, command and environment of the runs whose run.json is still there, at most RUNS_MAX of them."""
    runs: list[tuple[str, str, str]] = []
    for group in comparison.ranked + comparison.apart:
        for folder, run_id in group.with_files[: RUNS_MAX - len(runs)]:
            if (start := read_run_json(folder, run_id)).command:
                runs.append((run_id, start.command, f"# {start.environment}"))
    return runs
