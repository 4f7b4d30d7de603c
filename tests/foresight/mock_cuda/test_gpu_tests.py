"""The tests marked gpu, under the mock of CUDA: all that a GPU would be asked to do is asked for, and no number is looked at."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptscale.launchers.run.simulation import mock_variables

TESTS = Path(__file__).parents[2]
MARK = "mark." + "gpu"
FILES = sorted(path for path in TESTS.rglob("test_*.py") if MARK in path.read_text())
# A run does not start under the mock. test_recipes.py does what its ranks do.
REFUSED = {"test_gpu.py"}
# Cases that compile the same code once more, a minute each.
LEFT_OUT = {"test_conv.py": "dtype0", "test_max_pool.py": "dtype0", "test_compilation.py": "selective"}
# The compiler reads the code of assert statements of torch, which python -O leaves out.
WITH_ASSERTS = {"test_compilation.py"}


def test_every_gpu_test_is_found():
    assert REFUSED | set(LEFT_OUT) < {path.name for path in FILES}


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in FILES if path.name not in REFUSED], ids=lambda path: path.stem)
def test_runs_to_its_end(path):
    """Without assert statements in the tests, and with shapes and types compared only (tests/conftest.py)."""
    plain = [] if path.name in WITH_ASSERTS else ["-O"]
    command = [sys.executable, *plain, "-m", "pytest", "--assert=plain", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["--tb=short", "--show-capture=stderr", str(path), "-k", LEFT_OUT.get(path.name, "")]
    environ = {**os.environ, **mock_variables("", "h100-80", 1), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert "passed" in ended.stdout or "xfailed" in ended.stdout
    assert "skipped" not in ended.stdout
