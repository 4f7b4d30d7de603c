"""The bench of vision: the contenders do the same work, and their ratios are those of their rates."""

import pandas as pd
import pytest

from benchmarks.lenet import __main__ as bench


@pytest.mark.slow
def test_bench_compares_the_same_work(tmp_path, monkeypatch):
    """Run one round on the digits, with every contender in a process of its own, and check the ratios."""
    pytest.importorskip("sklearn")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The ratios are to the first two.
    names = ["plain, 0 workers", "plain, 2 workers", "fast loader"]
    monkeypatch.setattr(bench, "CONTENDERS", {name: bench.CONTENDERS[name] for name in names})
    words = ["--rounds", "1", "--threads", "1", "--csv", str(tmp_path / "b.csv")]
    assert bench.main(words) == 0
    frame = pd.read_csv(tmp_path / "b.csv").set_index("contender")
    assert frame.index.tolist() == names
    assert frame.ratio_to_0_workers["plain, 0 workers"] == 1
    ratio = frame.images_per_s["fast loader"] / frame.images_per_s["plain, 2 workers"]
    assert frame.ratio_to_2_workers["fast loader"] == pytest.approx(ratio)
    assert (frame.images_per_s > 0).all()
    assert (frame.batch_size == 32).all()
