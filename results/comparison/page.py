"""One self-contained HTML page of a comparison: table, pictures, definitions, and how to repeat each run."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from gptscale.common.recipe_config import LETTERS
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
DEFINITIONS = {
    "runs": "repeats of one configuration; every figure is the median over those that succeeded",
    "tokens/s": "tokens of the global batch over the median time of a whole step, data, optimizer and gaps between kernels included, the first steps left out; of all devices together",
    "speed-up": "tokens/s over those of `single`, one device, for the same work; without it, over those of the first run of that work",
    "time s": "seconds of all training steps, warm-up included; without start, saves and evaluations",
    "step ms": "median of the timed steps",
    "p10-p90": "10th and 90th percentile of the timed steps, in ms; two runs whose spreads overlap are not told apart",
    "TFLOP/s": "floating-point operations of the model per second and device, in 10^12: the numerator of MFU, there without a known peak too",
    "MFU": "tokens/s per device x (6 N_matmul + 6 L h T) FLOP (N_matmul: parameters of matrix products, L: blocks, h: hidden size, T: sequence) over the device's dense peak; empty where the peak is not known, as on a CPU",
    "GPU %": "mean share of the timed steps in which a kernel ran, over all GPUs (NVML)",
    "state GiB": "weights, gradients and optimizer state of the rank that holds most, on its device, and what its strategy moved to the host or to disk",
    "peak GiB": "highest over ranks of what tensors held on the device at once",
    "host GiB": "highest over ranks of what the process held in memory (resident set)",
    "loss": "mean over the last step's global batch in nats per token; runs of the same work must agree",
    "bound by": "what limits the speed, and how much shorter a step would be without it (gptscale why)",
    "status": "ok, oom (out of memory), failed, interrupted; damaged: the run's row cannot be read; contended: others took more than 5 % of the machine while it was timed; imported: of another program",
}

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>gptscale: comparison</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
 h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
 .wide { overflow-x: auto } table { border-collapse: collapse; width: 100% } th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #ddd }
 th:first-child, td:first-child, th:last-child, td:last-child { text-align: left } tr.apart { color: #888 } tr.bad { color: #b00020 } img { max-width: 100% }
 .panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem }
 dt { font-weight: 600 } dd { margin: 0 0 .4rem 1rem } pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; font-size: 13px }
 ul { color: #8a5a00; padding-left: 1.2rem }
 @media (max-width: 40rem) {
  thead { display: none } table, tbody, tr, td { display: block } tr { border: 1px solid #ddd; margin-bottom: .8rem }
  td, td:first-child, td:last-child { display: flex; justify-content: space-between; gap: 1rem; text-align: right; border: 0; padding: .15rem .6rem }
  td::before { content: attr(data-title); font-weight: 600; text-align: left }
 }
</style></head><body>
<h1>gptscale: which way of splitting this GPT?</h1>
<p>{{ about }}</p>
<div class="wide"><table><thead><tr>{% for title in rows[0] %}<th>{{ title }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr class="{{ 'apart' if loop.index0 >= n_ranked else '' if 'ok' in row.status else 'bad' }}">{% for title, cell in row.items() %}<td data-title="{{ title }}">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
<ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
<h2>Loss, speed and memory</h2>
<div class="panels">{% for name, png in pictures.items() %}<img alt="{{ name }}" src="data:image/png;base64,{{ png }}">
{% endfor %}</div>
<h2>What the columns mean</h2>
<dl>{% for name, text in definitions.items() %}<dt>{{ name }}</dt><dd>{{ text }}</dd>{% endfor %}</dl>
<h2>How each run was started</h2>
{% for name, command, environment in runs %}<p>{{ name }}</p><pre>{{ command }}
{{ environment }}</pre>{% endfor %}
</body></html>
"""


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
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(PAGE)
    return template.render(
        about=about,
        rows=rows,
        n_ranked=len(comparison.ranked),
        notes=notes(comparison),
        pictures={name: base64.b64encode(png).decode() for name, png in pictures.items()},
        definitions={
            title: DEFINITIONS[key]
            for title in rows[0]
            if (key := title.replace("state MiB", "state GiB")) in DEFINITIONS
        }
        | LEGEND,
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
