"""The pictures of `python -m benchmarks.model`: what their bars and lines stand for."""

from types import SimpleNamespace

import pandas as pd
import pytest

from benchmarks.model.options import OF_THIS_PACKAGE, ContenderResult
from benchmarks.model.picture import draw, draw_scaling
from benchmarks.model.scale import ScalingLine


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
