"""Tests marked gpu ask the mock of CUDA for all that they would ask a GPU for. No number is looked at."""

import os
import subprocess
import sys
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


class Session:
    """One pytest under the mock over all files, which imports torch once for all of them."""

    def __init__(self, report):
        words = " and ".join(f"(not {name} or {word})" for name, word in ONLY.items())
        # Without assert statements in the tests, and with shapes and types compared only (tests/conftest.py).
        command = [sys.executable, "-m", "pytest", "-p", "without_asserts", "--assert=plain", "-q", "-m", "gpu"]
        command += ["-p", "no:cacheprovider", "--tb=short", "--show-capture=stderr", "-k", words, *map(str, TRIED)]
        command += [f"--junit-xml={report}", "-o", "junit_family=xunit1"]
        # Imported from there: the plugin, and mock_engines.py by the parent of the engines' processes.
        environ = {**os.environ, **mock_variables("", "h100-80", 1), "PYTHONPATH": str(TESTS / "worlds")}
        environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        self.status = ended.returncode
        self.output = ended.stdout[-8000:] + ended.stderr[-2000:]
        self.cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []

    def of_file(self, path):
        """Return how each case of a file ended: passed, or the tag that the report gives it."""
        cases = [case for case in self.cases if TESTS.parent / case.get("file") == path]
        return [_outcome(case) for case in cases]


def _outcome(case):
    for ending in case:
        if ending.tag in ("failure", "error", "skipped"):
            return "xfailed" if ending.get("type") == "pytest.xfail" else ending.tag
    return "passed"


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return Session(tmp_path_factory.mktemp("session") / "report.xml")


def test_every_gpu_test_is_found():
    assert REFUSED | set(ONLY) < {path.name for path in FILES}


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("path", TRIED, ids=lambda path: path.stem)
def test_runs_to_its_end(path, session):
    outcomes = session.of_file(path)
    # A session ends with 0, or with 1 if a case of some file has failed.
    assert session.status in (0, 1), session.output
    assert outcomes, session.output
    assert set(outcomes) <= {"passed", "xfailed"}, session.output


@pytest.mark.slow
def test_a_session_fails_only_with_a_case(session):
    outcomes = [_outcome(case) for case in session.cases]
    assert session.status == int("failure" in outcomes or "error" in outcomes), session.output
