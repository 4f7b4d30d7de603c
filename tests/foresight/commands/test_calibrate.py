"""`gptscale calibrate` as it is typed."""

import subprocess
import sys

import pytest
from worlds import ok

from gptscale.common.errors import ConfigError
from gptscale.foresight.calibrate.costs import cost_table
from gptscale.foresight.calibrate.file import read
from gptscale.foresight.commands.calibrate import main
from gptscale.foresight.time.calibration import CALIBRATED
from gptscale.foresight.time.data_sheets import GLOO, HERE
from gptscale.foresight.time.operations import MessageShape
from gptscale.foresight.time.work import COMPUTE, Operation, StepWork

TINY = ["--n-layer", 2, "--n-embd", 32, "--n-head", 2, "--seq-len", 16, "--repeats", 3, "--micro-batch-size", 2]


@pytest.mark.slow
def test_a_world_is_measured_twice_and_both_are_kept(tmp_path):
    file = tmp_path / "calibration.json"
    for _ in range(2):
        out = ok(
            "calibrate", *TINY, "--nproc", 2, "--recipes", "fsdp", "--tp", "1,2", "--device", "cpu", "--out", file
        ).stdout
        assert f"added to {file}" in out
    (machine,) = read(file)
    assert (machine.machine.threads, machine.machine.world) == (1, 2)
    kinds = {t.operation.kind for t in machine.operations}
    assert {
        "product",
        "attention backward",
        "block forward",
        "head backward",
        "fsdp: block optimizer",
        "optimizer",
        "block elementwise",
    } <= kinds
    assert {"host", "stage", "all-reduce", "all-gather", "reduce-scatter", "send", "disk read"} <= kinds
    assert {"contention of computing", "launch of an operator", "taken by others"} <= {
        fact.name for fact in machine.facts
    }
    reduced = Operation("all-reduce", MessageShape(2**16, 2, 2, 1), GLOO)
    assert sum(t.operation == reduced for t in machine.operations) == 2
    step = StepWork()
    step.add("host", 0, COMPUTE, {Operation("host", (), HERE): 1.0, reduced: 1.0})
    prediction = cost_table(step.operations(), HERE, GLOO, file).predict(step)
    assert 0 < prediction.seconds < 10
    assert prediction.grade == CALIBRATED


@pytest.mark.slow
def test_ranks_of_torchrun_measure_together_and_the_first_prints(tmp_path):
    file = tmp_path / "calibration.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["gptscale.launchers.cli", "calibrate", *map(str, TINY), "--recipes", "none", "--device", "cpu"]
    command += ["--out", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(f"added to {file}") == 1
    (machine,) = read(file)
    assert machine.machine.world == 2
    assert any(t.operation.kind == "all-gather" for t in machine.operations)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--model", "tinny"], "unknown model 'tinny'"),
        (["--tp", "3"], "'3' does not divide 4 heads, in --tp, use one or more of"),
        (["--tp", "two"], "'two' does not divide"),
        (["--device-name", "h100"], "unknown name 'h100', in --device-name"),
        (["--micro-batch-size", "2,x"], "'2,x' is no list of sizes"),
        (["--link", "glo"], "unknown name 'glo', in --link"),
        (["--recipes", "fsdpp"], "unknown recipe 'fsdpp'"),
        (["--recipes", "pipeline"], "pipeline has no layers of its own"),
        (["--repeats", "1"], "repeats"),
        (["--n-head", "5"], "n_embd 128 is not divisible by n_head 5"),
    ],
)
def test_bad_input_is_one_line(words, what, tmp_path):
    with pytest.raises(ConfigError, match=what.replace("[", r"\[")):
        main([*words, "--device", "cpu", "--out", str(tmp_path / "c.json")])
    assert not (tmp_path / "c.json").exists()
