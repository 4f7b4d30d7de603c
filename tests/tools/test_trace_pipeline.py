"""`python -m tools.trace_pipeline`: a picture and its numbers for each schedule, from a real world."""

import json
from itertools import pairwise

import pytest
from matplotlib import image
from worlds import ok

from gptscale.common.measure.bubble import StageSpan, bubble_fraction
from tools.trace_pipeline import gaps


def test_every_schedule_asked_for_is_drawn_from_real_steps(tmp_path):
    ok(
        *"--schedules 1F1B,ZBVZeroBubble --nproc 2 --n-layer 4 --n-embd 64 --data synthetic --out".split(),
        tmp_path,
        module="tools.trace_pipeline",
    )
    for schedule, stages, kinds in (("1F1B", 2, "FB"), ("ZBVZeroBubble", 4, "FIW")):
        trace = json.loads((tmp_path / f"{schedule}.json").read_text())
        spans = {rank: [StageSpan(*s) for s in of_rank] for rank, of_rank in enumerate(trace["ranks"])}
        computed = {(s.kind, s.stage, s.micro_batch) for of_rank in spans.values() for s in of_rank}
        assert {(kind, s, m) for kind in "FW" if kind in kinds for s in range(stages) for m in range(8)} <= computed
        for of_rank in spans.values():
            assert all(a.end <= b.begin for a, b in pairwise(of_rank))
        by = {(s.kind, s.stage, s.micro_batch): s for of_rank in spans.values() for s in of_rank}
        # All ranks have one clock.
        assert all(by["F", 1, m].begin >= by["F", 0, m].end - 1e-3 for m in range(8))
        idle = sum(end - begin for of_rank in gaps(spans, stages).values() for _, begin, end in of_rank)
        assert 0 < bubble_fraction(spans) < 1
        assert idle > 0
        assert trace["theory"] == pytest.approx({"1F1B": 1 / 9, "ZBVZeroBubble": 2 / 98}[schedule], rel=0.05)
        assert image.imread(tmp_path / f"{schedule}.png").shape[1] > 1000


def test_gaps_are_bubble_until_the_input_came_and_then_communication():
    spans = {0: [StageSpan("F", 0, 0, 0.0, 1.0)], 1: [StageSpan("F", 1, 0, 1.25, 2.0)]}
    assert gaps(spans, 2) == {0: [("bubble", 1.0, 2.0)], 1: [("bubble", 0.0, 1.0), ("communication", 1.0, 1.25)]}
