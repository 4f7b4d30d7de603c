"""One self-contained HTML page of a comparison: table, picture, definitions, and how to repeat each run."""

from __future__ import annotations

import base64
import json
import shlex
from pathlib import Path

import jinja2

from gptscale.results.compare import Comparison
from gptscale.results.tables import cells, notes

DEFINITIONS = {
    "tokens/s": "tokens of the global batch over the median time of a whole step (data, optimizer and host gaps included), warm-up left out",
    "vs single": "tokens/s over those of `single` for the same work",
    "step ms (p10-p90)": "median, 10th and 90th percentile of the timed steps",
    "MFU": "tokens/s x (6 N_matmul + 6 L h T) over the device's dense peak; empty for a device whose peak is not in the table",
    "peak GiB": "highest over ranks: tensors on the GPU, or the host's resident set where there is none",
    "last loss": "mean over the last global batch; runs of the same work must agree",
}

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>gptscale: comparison</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
 h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
 table { border-collapse: collapse; width: 100% } th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #ddd }
 th:first-child, td:first-child { text-align: left } tr.apart { color: #888 } img { max-width: 100% }
 dt { font-weight: 600 } dd { margin: 0 0 .4rem 1rem } pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; font-size: 13px }
 .note { color: #8a5a00 }
</style></head><body>
<h1>gptscale: which way of splitting this GPT?</h1>
<p>{{ about }}</p>
<table><thead><tr>{% for title in rows[0] %}<th>{{ title }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr{% if loop.index0 >= n_ranked %} class="apart"{% endif %}>{% for cell in row.values() %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
{% for note in notes %}<p class="note">{{ note }}</p>{% endfor %}
<h2>Loss, speed and memory</h2>
<img alt="loss curves, their deviation, speed and memory" src="data:image/png;base64,{{ png }}">
<h2>What the columns mean</h2>
<dl>{% for name, text in definitions.items() %}<dt>{{ name }}</dt><dd>{{ text }}</dd>{% endfor %}</dl>
<h2>How each run was started</h2>
{% for name, command, environment in runs %}<p>{{ name }}</p><pre>{{ command }}
{{ environment }}</pre>{% endfor %}
</body></html>
"""


def page(comparison: Comparison, png: bytes) -> str:
    """The page; text is escaped, nothing is fetched from anywhere."""
    row = comparison.ranked[0].rows.iloc[0]
    about = (
        f"{row.model}, {row.n_params:,.0f} parameters, sequence {row.seq_len}, global batch {row.global_batch_size}, {row.steps} steps, "
        f"{row.precision}, data {row.data}, seed {row.seed}; {row.device}; workload {row.workload_hash}."
    )
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(PAGE)
    return template.render(
        about=about,
        rows=cells(comparison),
        n_ranked=len(comparison.ranked),
        notes=notes(comparison),
        png=base64.b64encode(png).decode(),
        definitions=DEFINITIONS,
        runs=_runs(comparison),
    )


def _runs(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Name, command and environment of every run whose run.json is still there."""
    found = []
    for row in comparison.frame.itertuples():
        file = Path(str(row.folder)) / "runs" / str(row.run_id) / "run.json"
        if file.is_file():
            noted = json.loads(file.read_bytes())
            environment = noted["environment"]
            versions = ", ".join(f"{k} {v}" for k, v in environment["packages"].items())
            found.append(
                (
                    str(row.run_id),
                    shlex.join(noted["command"]),
                    f"# Python {environment['python']}, {versions}, {environment['device']}",
                )
            )
    return found
