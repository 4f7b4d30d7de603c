"""Decide for the best rows of a plan: a simulation of their memory, and what limits their step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gptscale.common.errors import GptscaleError
from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.plan.planner import WorkPlan, with_limits
from gptscale.foresight.plan.report import merged
from gptscale.foresight.plan.rows import PlannedRow


def decide(plan: WorkPlan, n_rows: int, simulate: Callable[[PlannedRow], RankMemory]) -> None:
    """Simulate the best rows, first the recommended one, until `n_rows` of them fit."""
    failed: set[tuple[str, int, int]] = set()
    for _ in range(2 * n_rows):
        rows = [row for row in merged(plan.best)[0] if not row.timing.refused and row.candidate.split not in failed]
        best = plan.recommended
        rows.sort(key=lambda row: best is not None and row.candidate.split != best.candidate.split)
        row = next((row for row in rows[:n_rows] if row.simulated is None), None)
        if row is None:
            return
        try:
            simulated = simulate(row)
        except GptscaleError as error:
            failed.add(row.candidate.split)
            plan.left_out[f"a simulation of {row.name}"] = str(error)[:160]
            continue
        place = next(i for i, other in enumerate(plan.rows) if other is row)
        plan.rows[place] = dataclasses.replace(row, simulated=simulated)


def find_limits(plan: WorkPlan, rows: list[PlannedRow]) -> None:
    """Find what bounds each row of the table."""
    assert plan.costs is not None
    for i, row in enumerate(rows):
        rows[i] = with_limits(row, plan.costs)
        place = next(i for i, other in enumerate(plan.rows) if other is row)
        plan.rows[place] = rows[i]
