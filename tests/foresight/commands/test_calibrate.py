"""`gptscale calibrate` as it is typed."""

import subprocess
import sys

import pytest
from worlds import ok

from gptscale.foresight.calibrate.file import Operation, read

TINY = ["--n-layer", 2, "--n-embd", 32, "--n-head", 2, "--seq-len", 16, "--repeats", 3, "--micro-batch-size", 2]


@pytest.mark.slow
def test_a_world_is_measured_twice_and_both_are_kept(tmp_path):
    file = tmp_path / "calibration.json"
    for _ in range(2):
        out = ok("calibrate", *TINY, "--nproc", 2, "--tp", "1,2", "--device", "cpu", "--out", file).stdout
        assert f"added to {file}" in out
    (machine,) = read(file)
    assert (machine.machine.threads, machine.machine.world) == (1, 2)
    kinds = {t.operation.kind for t in machine.operations}
    collectives = "all-reduce all-gather reduce-scatter send".split()
    assert kinds == {"product", "attention forward", "attention backward", "pass", *collectives}
    assert sum(t.operation == Operation("all-reduce", (2**16, 2, 2)) for t in machine.operations) == 2


@pytest.mark.slow
def test_ranks_of_torchrun_measure_together_and_the_first_prints(tmp_path):
    file = tmp_path / "calibration.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["gptscale.launchers.cli", "calibrate", *map(str, TINY), "--device", "cpu"]
    command += ["--out", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(f"added to {file}") == 1
    (machine,) = read(file)
    assert machine.machine.world == 2
    assert any(t.operation.kind == "all-gather" for t in machine.operations)
