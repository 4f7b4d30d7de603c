"""The line fitted to the points of --scale."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.model import scale as model_scale


def test_fit_finds_the_line_and_leaves_out_what_did_not_run():
    frame = pd.DataFrame({"seq_len": [256, 512, 1024, 2048], "status": ["ok", "ok", "ok", "oom"]})
    frame["us_per_token"] = [10.256, 10.512, 11.024, None]
    line = model_scale.fit(frame, "seq")
    assert line == pytest.approx((10.0, 1e-3, 0.0), abs=1e-9)
    assert line.in_words("seq") == "10.00 + 1.024 per 1024 positions"
    assert model_scale.fit(frame[2:], "seq") is None
