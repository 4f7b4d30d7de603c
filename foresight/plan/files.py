"""What a plan leaves: its table as Markdown, a page, a picture, and the plan itself in a file."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptscale.common.settings.plan_file import FORMAT_VERSION, hash_of, options_of
from gptscale.foresight.plan.command_lines import words_of
from gptscale.foresight.plan.planner import WorkPlan
from gptscale.foresight.plan.question import GIB
from gptscale.foresight.plan.report import LEFT, page
from gptscale.foresight.plan.rows import PlannedRow
from gptscale.results.record.files import export
from gptscale.results.render import markdown, picture_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class PlanTable:
    """The table of a plan as it is shown. recommended: the number of its row."""

    title: str
    lines: Sequence[str]
    rows: Sequence[PlannedRow]
    cells: Sequence[dict[str, str]]
    notes: Sequence[str]
    recommended: int


def write_figure(figure: Figure, shown: PlanTable, png: Path | None, html: Path | None) -> None:
    """Write a picture, and a page of it and the table."""
    if png:
        export(png, picture_bytes(figure, png.suffix[1:] or "png"))
    if html:
        text = page(shown.title, shown.lines, shown.cells, shown.notes, picture_bytes(figure))
        export(html, text.encode())


def write_table(path: Path, shown: PlanTable) -> None:
    """Write the table as Markdown."""
    export(path, markdown(shown.cells, left=LEFT, notes=shown.notes).encode())


def write_plan(path: Path, shown: PlanTable, plan: WorkPlan, argv: Sequence[str]) -> str:
    """Write the plan for `gptscale run --plan` and return its hash."""
    content = {
        "command": ["gptscale", "plan", *argv],
        "cluster": dataclasses.asdict(plan.cluster),
        "recommended": shown.recommended,
        "rows": [
            {
                "name": row.name,
                "recipe": row.candidate.run.recipe,
                "nodes": plan.cluster.nodes,
                "ranks": plan.cluster.ranks,
                "words": words_of(row),
                "options": options_of(row.candidate.run, row.candidate.config),
                "predicted_step_time_s": row.timing.seconds,
                "interval_s": [row.timing.low, row.timing.high],
                "grade": row.timing.grade,
                "predicted_peak_mem_gib": (row.simulated.allocated if row.simulated else row.places.on_device) / GIB,
                "memory_by": "simulation" if row.simulated else "bound",
            }
            for row in shown.rows
        ],
    }
    return save_plan(path, content)


def save_plan(path: Path, content: Mapping[str, Any]) -> str:
    """Write a plan under its hash and return that."""
    versions = {"gptscale": importlib.metadata.version("gptscale"), "torch": importlib.metadata.version("torch")}
    document = {"format": FORMAT_VERSION, "versions": versions, **content}
    document["sha256"] = hash_of(document)
    export(path, (json.dumps(document, indent=1) + "\n").encode())
    return str(document["sha256"])
