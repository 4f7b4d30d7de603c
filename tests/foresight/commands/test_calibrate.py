"""`gptscale calibrate` as it is typed."""

import subprocess
import sys

import pytest
from worlds import ok

from gptscale.foresight.calibrate.file import Operation, read

TINY = "--n-layer 2 --n-embd 32 --n-head 2 --seq-len 16 --repeats 3 --micro-batch-size 2".split()


@pytest.mark.slow
def test_a_world_of_ours_and_one_of_torchrun_are_measured_and_kept(tmp_path):
    file = tmp_path / "calibration.json"
    words = ["calibrate", *TINY, "--tp", "1,2", "--device", "cpu", "--out", str(file)]
    ours = ok(*words, "--nproc", 2).stdout
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    torchrun += ["gptscale.launchers.cli", *words]
    ended = subprocess.run(torchrun, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    # The first rank alone prints.
    assert ours.count(f"added to {file}") == ended.stdout.count(f"added to {file}") == 1
    (machine,) = read(file)
    assert (machine.machine.threads, machine.machine.world) == (1, 2)
    kinds = {t.operation.kind for t in machine.operations}
    collectives = "all-reduce all-gather reduce-scatter send".split()
    assert kinds == {"product", "attention forward", "attention backward", "pass", *collectives}
    assert sum(t.operation == Operation("all-reduce", (2**16, 2, 2)) for t in machine.operations) == 2
