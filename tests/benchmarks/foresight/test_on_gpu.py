"""`python -m benchmarks.foresight.on_gpu` with the mock of CUDA as the GPU says what simulate says."""

import csv
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from mocked import mock_variables

from gptscale.common.measure.gpus import GIB
from gptscale.common.settings.command_line import parse
from gptscale.foresight.simulate.own_program import ProgramOptions

# The bench itself refuses to measure on a mock.
UNDER_A_MOCK = """
import sys
from gptscale.common.process.mock import simulating
from benchmarks.foresight import on_gpu
with simulating():
    sys.exit(on_gpu.main(sys.argv[1:]))
"""
RECIPE = "-W ignore -Pm gptscale.foresight.simulate.recipe_program fsdp --model tiny --device cuda --data synthetic"


@pytest.mark.slow
def test_a_rank_takes_what_simulate_says(tmp_path):
    options, command = "--world 4 --rank 3 --steps 2 --as h200", f"{sys.executable} {RECIPE} --global-batch-size 8"
    programs, out = tmp_path / "programs.csv", tmp_path / "took.csv"
    rows = [
        f"a rank,{tmp_path},{options},{command},allocated,1",
        f"no such,{tmp_path},{options},{sys.executable} x.py,,1",
    ]
    programs.write_text("\n".join(["what,folder,options,command,figure,gib", *rows, ""]))
    bench = [sys.executable, "-c", UNDER_A_MOCK, "--programs", str(programs), "--csv", str(out)]
    how = {"env": {**os.environ, **mock_variables("", "h200", 1)}, "cwd": Path(__file__).parents[3]}
    ended = subprocess.run(bench, **how, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, "1 programs measured, 1 failed" in ended.stdout) == (1, True), ended.stdout + ended.stderr
    took = {row["figure"]: float(row["gib"]) for row in csv.DictReader(out.open())}
    simulation = parse(ProgramOptions, options.split(), prog="options").simulate(shlex.split(command), "3", tmp_path)
    memory = simulation.memory()
    assert took == {"allocated": memory.allocated / GIB, "reserved": memory.reserved / GIB}
