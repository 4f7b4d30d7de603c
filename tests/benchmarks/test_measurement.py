"""What all benches share: a CSV that grows row by row, circumstances, and cells without a figure."""

import pandas as pd
import pytest

from benchmarks.measurement import circumstances, collect
from gptscale.common.settings.gpt_config import PRESETS


def test_a_bench_that_is_cut_short_leaves_the_rows_that_it_has(tmp_path):
    def rows():
        yield {"way": "one", "seconds": 0.25}
        yield {"way": "two", "seconds": None}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(rows(), tmp_path / "b.csv", device="cpu")
    frame = pd.read_csv(tmp_path / "b.csv")
    assert list(frame) == ["way", "seconds", "device"]
    assert frame.way.tolist() == ["one", "two"]
    assert frame.seconds.isna().tolist() == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["b.csv"]


def test_circumstances_are_the_shape_the_work_and_the_machine():
    gpt = PRESETS["1.6b"]
    facts = circumstances(gpt, batch_size=3, dtype="bf16", threads=2, device="a CPU", command="gptscale bench x")
    shape = ("hidden", "layers", "heads", "seq_len")
    assert tuple(facts[name] for name in shape) == (1600, 48, 32, 1024)
    assert facts["command"] == "gptscale bench x"
    assert "data" not in facts
    with_data = circumstances(gpt, batch_size=3, dtype="bf16", threads=2, device="", command="", data="text")
    assert with_data["data"] == "text"
