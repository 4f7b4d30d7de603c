"""Tests marked gpu ask the mock of CUDA for all that they would ask a GPU for. No number is looked at."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from mocked import mock_variables

TESTS = Path(__file__).parents[2]
FILES = sorted(path for path in TESTS.rglob("test_*.py") if "mark." + "gpu" in path.read_text())
# A run does not start under the mock. test_recipes.py does what its ranks do.
REFUSED = {"test_gpu.py"}
# These files run only the cases whose names hold the word. The others compile the same code once more, a minute each.
ONLY = {"test_conv.py": "dtype0", "test_max_pool.py": "dtype0", "test_compilation.py": "selective"}
TRIED = [path for path in FILES if path.name not in REFUSED]
# On a busy machine without compiled kernels the session has taken 730 s.
LIMIT_S = 2300


def _outcome(case):
    """Return how a case ended: passed, or the tag that the report gives it."""
    for ending in case:
        if ending.tag in ("failure", "error", "skipped"):
            return "xfailed" if ending.get("type") == "pytest.xfail" else ending.tag
    return "passed"


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Return how one pytest under the mock ended over all files: its status, its output, and its cases by file.

    It imports torch once for all of them.
    """
    report = tmp_path_factory.mktemp("session") / "report.xml"
    words = " and ".join(f"(not {name} or {word})" for name, word in ONLY.items())
    # Without assert statements in the tests, and with shapes and types compared only (tests/conftest.py).
    command = [sys.executable, "-m", "pytest", "-p", "without_asserts", "--assert=plain", "-q", "-m", "gpu"]
    command += ["-p", "no:cacheprovider", "--tb=short", "--show-capture=stderr", "-k", words, *map(str, TRIED)]
    command += [f"--junit-xml={report}", "-o", "junit_family=xunit1"]
    # Imported from there: the plugin, and mock_engines.py by the parent of the engines' processes.
    environ = {**os.environ, **mock_variables("", "h100-80", 1), "PYTHONPATH": str(TESTS / "worlds")}
    environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    outcomes = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        outcomes[TESTS.parent / case.get("file")].append(_outcome(case))
    return ended.returncode, ended.stdout[-8000:] + ended.stderr[-2000:], outcomes


def test_every_gpu_test_is_found():
    assert REFUSED | set(ONLY) < {path.name for path in FILES}


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("path", TRIED, ids=lambda path: path.stem)
def test_runs_to_its_end(path, session):
    status, output, outcomes = session
    # A session fails only with a case of some file.
    assert status == int(any({"failure", "error"} & {*of_file} for of_file in outcomes.values())), output
    assert outcomes[path], output
    assert set(outcomes[path]) <= {"passed", "xfailed"}, output
