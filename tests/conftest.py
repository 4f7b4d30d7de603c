"""Fixtures for all tests: nothing may leak from one test into the next."""

import gc
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from made_up_clock import Clock
from ports import next_port

from gptscale.common.process.mock import is_mock, simulating
from gptscale.launchers.cli import main
from gptscale.launchers.run.preflight import why_not_here

CHANGED_BY_LIBRARIES = tuple("KINETO TORCH PYTORCH _TORCH TRITON CUDA TF_ GRPC PYTEST HF_ TOKENIZERS KMP_ MPL".split())
# Where pytest's cache keeps the seconds that each file took.
SECONDS = "gptscale/seconds"


def pytest_configure(config: pytest.Config) -> None:
    # Until all is imported: collections would walk again and again what the imports have made.
    gc.disable()
    config.addinivalue_line(
        "markers", "cluster: brings up several machines, on this one; -m 'not cluster' leaves them out"
    )
    config.addinivalue_line("markers", "promise(row): holds a row of docs/guides/faults.md (tools/promises.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # The file uses something of tests/worlds/worlds.py.
        if "worlds" in (getattr(value, "__module__", "") for value in vars(item.module).values()):
            item.add_marker("world")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("gpu") and is_mock():
            # All must work under the mock but what looks at a number.
            item.add_marker(pytest.mark.xfail(raises=AssertionError, reason="the mock of CUDA computes nothing"))
    # Several files run at a time (make test): the longest first, or the last would run alone. Until it was measured, a file
    # takes as many seconds as it has tests that start processes or are slow.
    seconds = Counter(file_of(item) for item in items if any(map(item.get_closest_marker, ("world", "slow"))))
    seconds |= Counter(config.cache.get(SECONDS, {}) if hasattr(config, "cache") else {})
    items.sort(key=lambda item: -seconds[file_of(item)])


def file_of(item: pytest.Item | pytest.TestReport) -> str:
    """Return the path of a test's file, from the root of the checkout."""
    return item.nodeid.partition("::")[0]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Keep the most seconds that each file ever took, because a session may run a part of it."""
    took: Counter[str] = Counter()
    for report in chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            took[file_of(report)] += report.duration
    if cache := getattr(config, "cache", None):
        cache.set(SECONDS, took | Counter(cache.get(SECONDS, {})))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the worlds of zero_infinity where its library cannot be compiled, for want of libaio."""
    parameters = str(item.callspec.params) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    if "zero_infinity" in parameters and item.get_closest_marker("world") and (reason := why_not_here("zero_infinity")):
        pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _tests_may_use_a_mock() -> Iterator[None]:
    """Under the mock of CUDA compare shapes and types, because numbers are what the memory happened to hold."""
    with pytest.MonkeyPatch.context() as patch, simulating() if is_mock() else nullcontext():
        if is_mock():
            patch.setattr(torch.testing, "assert_close", _assert_alike)
            # To print a tensor torch counts what is not zero, and would make a tensor of whatever length it reads there.
            patch.setattr(torch.Tensor, "__repr__", lambda tensor: f"<{tensor.dtype} {list(tensor.shape)} of a mock>")
        yield


def _assert_alike(actual: torch.Tensor, expected: torch.Tensor, **tolerances: float) -> None:
    assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device)


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """A test that leaves an environment variable, a process group or a signal handler behind fails."""
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    yield
    after = {k: v for k, v in os.environ.items() if not k.startswith(CHANGED_BY_LIBRARIES)}
    assert after == {k: v for k, v in before.items() if not k.startswith(CHANGED_BY_LIBRARIES)}
    assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Return a function that runs a command, checks what every refusal must keep, and returns its one line."""

    def refused(words: list[str]) -> str:
        before = sorted(folder.rglob("*"))
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("gptscale: error: ")
        # Nothing was created.
        assert sorted(folder.rglob("*")) == before
        return line

    return refused


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    return next_port()


@pytest.fixture(scope="session")
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a C++ compiler that leaves out all optimization, for tests of how a library is built and not of its speed."""
    compiler = tmp_path_factory.mktemp("compiler") / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0\n')
    compiler.chmod(0o755)
    return str(compiler)


@pytest.fixture(scope="session")
def pretending_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a C++ compiler that makes an empty module, whatever its sources are, for tests of a build's files."""
    folder = tmp_path_factory.mktemp("pretending")
    # Weak, because each of several sources defines it.
    (folder / "module.cpp").write_text(
        '#include <Python.h>\nstatic PyModuleDef module = {PyModuleDef_HEAD_INIT, "pin_memory"};\n'
        "PyMODINIT_FUNC __attribute__((weak)) PyInit_pin_memory() { return PyModule_Create(&module); }\n"
    )
    compiler = folder / "c++"
    # A word that ends in .cpp is the source. All others, such as the name of the object file, stay.
    words = f"${{@/%*.cpp/{folder}/module.cpp}}"
    # While there is a file `hold` beside it, a build stays under way, and it fails in the end.
    held = f"[ -e {folder}/hold ]"
    hold = f"if {held}; then while {held} && [ $SECONDS -lt 300 ]; do sleep 0.05; done; exit 1; fi"
    compiler.write_text(f'#!/bin/bash\n{hold}\nexec {os.environ.get("CXX", "c++")} "{words}"\n')
    compiler.chmod(0o755)
    return str(compiler)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """`tmp_path` as a disk of its own, of 2 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real data sets beside the checkout, where there is one. The package itself never needs it."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the folder shared/data beside the checkout")
    return folder
