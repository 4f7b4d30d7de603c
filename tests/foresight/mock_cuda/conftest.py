"""A parent under the mock for each environment, and what a simulation of a recipe leaves."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from mocked import mock_variables

from gptscale.common.process import environments
from gptscale.foresight.mock_cuda.boot import environment_of
from gptscale.foresight.simulate.program import read_simulation
from gptscale.recipes import get

PARENT = Path(__file__).parents[2] / "worlds" / "mock_parent.py"
BATCH = ["--micro-batch-size", "2", "--global-batch-size", "32", "--precision", "bf16"]
WORDS = ["--device", "cuda", "--data", "synthetic", "--no-tensorboard", *BATCH]
# One thread, and kernels are compiled in the process that asks for them: a pool would import torch once more for a few kernels.
# Torch logs each second compilation, with the reason.
VARIABLES = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCH_LOGS": "recompiles"}


@pytest.fixture(scope="session")
def parents():
    """Return the started parent of an environment, which exists until the session ends."""
    started = {}

    def parent(environment):
        if environment not in started:
            if not Path(environments.python(environment)).exists():
                pytest.skip(f"needs the environment of {environment}")
            variables = {**os.environ, **mock_variables(environment, "h100-80", 8), **VARIABLES}
            command = [environments.python(environment), "-W", "ignore", str(PARENT)]
            started[environment] = subprocess.Popen(
                command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        return started[environment]

    yield parent
    for process in started.values():
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="session")
def under_mock(parents, tmp_path_factory):
    """Return a function that does `what` ("simulate" or "run") as one rank on a node of 8: the exit status and the folder."""

    def do(what, recipe, *words, rank=0, world_size=8):
        folder = tmp_path_factory.mktemp(recipe)
        words = [recipe, *WORDS, "--out", str(folder / "out"), *words]
        job = (what, str(folder), environment_of(rank, world_size, 8), words)
        process = parents(get(recipe).environment)
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline()), folder

    return do


@pytest.fixture(scope="session")
def simulated(under_mock):
    """Return a function that simulates a rank of `recipe`: the exit status, the simulation and what was printed."""

    def simulate(recipe, *words, **rank_and_world):
        status, folder = under_mock("simulate", recipe, *words, **rank_and_world)
        # No figure is in the results folder.
        assert {path.name for path in (folder / "out").glob("*")} <= {"runs"}
        there = (folder / "report.json").exists()
        return status, read_simulation(folder) if there else None, (folder / "log").read_text()

    return simulate
