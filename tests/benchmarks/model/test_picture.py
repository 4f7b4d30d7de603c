"""The pictures of `python -m benchmarks.model`: what their bars and lines stand for."""

from types import SimpleNamespace

import pandas as pd
import pytest

from benchmarks.model.options import OF_THIS_PACKAGE, ContenderResult
from benchmarks.model.picture import draw, draw_contenders, draw_scaling, draw_waterfall
from benchmarks.model.scale import ScalingLine
from gptscale.results.render import subplots


@pytest.fixture
def axis():
    _, ((axis,),) = subplots(1, 1, (4, 3))
    return axis


def report_of(parts=(), floors=(), speeds=()):
    """A report of steps of 100 tokens, of contenders with their tokens/s and of the microseconds of parts."""
    rows = [
        {"name": name, "tokens_per_s": speed, "seconds_p10": 80 / speed, "seconds_p90": 125 / speed}
        for name, speed in speeds
    ]
    sizes = "hidden layers seq_len vocab_size batch_size dtype device torch_version".split()
    return SimpleNamespace(
        bench=SimpleNamespace(tokens=100),
        results=list(range(len(rows))),
        row=lambda i: rows[i],
        gemm_s=0.01,
        ours=ContenderResult(OF_THIS_PACKAGE[0], parts=dict(parts)),
        parts=lambda result: dict(parts),
        floors=lambda: dict(floors),
        circumstances=dict.fromkeys(sizes, 1),
    )


def test_contenders_are_bars_from_the_top_with_the_spread_of_their_steps(axis):
    draw_contenders(axis, report_of(speeds=[(OF_THIS_PACKAGE[0], 4000.0), ("minimal", 2000.0)]))
    assert [label.get_text() for label in axis.get_yticklabels()] == ["minimal", OF_THIS_PACKAGE[0]]
    assert [bar.get_width() for bar in axis.patches] == [2000.0, 4000.0]
    assert axis.patches[0].get_facecolor() != axis.patches[1].get_facecolor()
    # p10 to p90 of the seconds are p90 to p10 of the tokens/s.
    assert axis.lines[1].get_xdata() == pytest.approx([100 / 125 * 4000, 100 / 80 * 4000])
    # 100 tokens in 10 ms, were there nothing but the products.
    assert list(axis.lines[-1].get_xdata()) == [10_000.0, 10_000.0]


def test_parts_follow_one_another_and_end_where_the_sum_does(axis):
    measured = {"matrix products": 6.0, "optimizer": 3.0, "gaps": 1.0}
    # The optimizer was faster than its floor, as measurement allows.
    draw_waterfall(axis, report_of(measured, {"matrix products": 4.0, "optimizer": 3.5, "gaps": 0.0}))
    bars = [(bar.get_x(), bar.get_width()) for bar in axis.patches]
    floors, above = bars[0::2], bars[1::2]
    assert [begin for begin, _ in floors] == [0.0, 6.0, 9.0, 0.0]
    assert [width for _, width in floors] == [4.0, 3.0, 0.0, 7.5]
    assert [begin + width for begin, width in above] == [6.0, 9.0, 10.0, 10.0]


@pytest.mark.parametrize("parts", [{}, {"gaps": 2.0}])
def test_a_report_is_a_picture_also_without_a_profile(parts, tmp_path):
    draw(report_of(parts, {"gaps": 1.0}, [("minimal", 10.0)]), tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ran", [True, False])
def test_a_scaling_picture_needs_no_point_that_ran(ran, tmp_path):
    frame = pd.DataFrame({"seq_len": [256, 512], "gemm_us_per_token": [1.0, 1.5]})
    frame = frame.assign(contender="single", hidden=32, dtype="fp32", device="a CPU", torch_version="2.11")
    if ran:
        frame["us_per_token"] = [2.0, 2.5]
    line = ScalingLine(1.5, 0.5 / 256, 0.0) if ran else None
    draw_scaling(frame, line, "seq", tmp_path / "s.png")
    assert (tmp_path / "s.png").stat().st_size > 1000
