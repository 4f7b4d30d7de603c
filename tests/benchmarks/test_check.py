"""The goals of speed with stand-ins for the benches: which ratios it takes, and what it says of them."""

import pandas as pd
import pytest

from benchmarks import check
from gptscale.launchers.cli import start

GOOD = {"gelu": 1.4, "bias_gelu": 1.9, "max_pool2d": 1.5, "conv_bias_relu": 1.01}


@pytest.fixture
def benches(monkeypatch):
    """Answer each bench with made-up figures, which a test may change, and note what was asked."""
    figures = {"ops": GOOD, "fast loader": 3.4, "seconds": [13.0, 9.0, 26.0], "accuracies": [0.995, 0.9941, 0.9936]}
    figures |= {"status": 0, "asked": []}

    def run(*words):
        figures["asked"].append(words)
        # Small tensors do not count.
        sizes = {16: 0.1, 256: 1.0, 1024: 1.0}
        rows = [(name, size, ratio * k) for name, ratio in figures["ops"].items() for size, k in sizes.items()]
        loaders = [("plain, 0 workers", 1.0), ("fast loader", figures["fast loader"])]
        frames = {
            "benchmarks.ops": pd.DataFrame(rows, columns=["operator", "size_kib", "ratio_to_torch"]),
            "benchmarks.lenet": pd.DataFrame(loaders, columns=["contender", "ratio_to_0_workers"]),
            check.LENET[0]: pd.DataFrame({"seconds_to_99": figures["seconds"], "test_accuracy": figures["accuracies"]}),
        }
        if "--csv" in words:
            frames[words[0]].to_csv(words[-1])
        return figures["status"]

    monkeypatch.setattr(check, "run", run)
    return figures


def test_all_goals_reached(benches, tmp_path, capsys):
    floors = tmp_path / "floors.csv"
    floors.touch()
    assert start(check.main, ["--floors", str(floors), "--mnist", str(tmp_path), "--allow-busy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*check.OPERATORS, *check.MNIST]
    assert all(line.endswith(": reached") for line in lines)
    assert "mnist_25_s_over_time_to_99 1.923" in " ".join(lines)
    asked = [words[2] if words[0].endswith("cli") else words[0] for words in benches["asked"]]
    assert asked == ["benchmarks.model", "benchmarks.ops", "benchmarks.lenet", "baseline", "baseline"]
    assert all("--allow-busy" in words for words in benches["asked"][:2])


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"ops": GOOD | {"bias_gelu": 1.29}}, "bias_gelu"),
        ({"ops": {name: ratio for name, ratio in GOOD.items() if name != "gelu"}}, "gelu"),
        ({"fast loader": 2.9}, "mnist_fast_loader_over_plain"),
        ({"seconds": [26.0, 27.0, float("nan")]}, "mnist_25_s_over_time_to_99"),
        ({"accuracies": [0.9939, 0.995, 0.9939]}, "mnist_accuracy_of_best"),
    ],
)
def test_a_goal_that_is_missed_is_named(change, missed, benches, tmp_path, capsys):
    benches.update(change)
    assert start(check.main, ["--mnist", str(tmp_path)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("NOT REACHED")]
    assert [line.split()[0] for line in lines] == [missed]


def test_a_bench_that_fails_is_one_line(benches, capsys):
    benches["status"] = 2
    assert start(check.main, []) == 2
    assert (
        capsys.readouterr().err
        == "gptscale: error: benchmarks.ops --largest-kib 16384 failed, in benchmarks.check, see its own message above\n"
    )
