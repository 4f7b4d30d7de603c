"""What a rank or its warm parent imports of Colossal-AI before a run: the library itself, once."""

import importlib
import runpy
import sys
import warnings

import pytest

LIBRARY = "gptscale.common.engines.colossal.library"


@pytest.fixture
def quiet_import(monkeypatch):
    """Return a function that runs the module, whose warnings, log levels and settings of torch do not outlive the test."""
    # By hand, because what undoes a monkeypatch deletes a setting of torch 2.5.
    config = importlib.import_module("torch._inductor.config")
    before, config.compile_threads = config.compile_threads, 4
    for name in [name for name in sys.modules if name.partition(".")[0] == "colossalai"]:
        monkeypatch.delitem(sys.modules, name)
    with warnings.catch_warnings():
        yield lambda: runpy.run_module(LIBRARY) and config.compile_threads
    config.compile_threads = before
    for name in ("colossalai.booster", "colossalai"):
        sys.modules.pop(name, None)


def test_it_imports_what_ranks_would_otherwise_import_each_for_itself(tmp_path, monkeypatch, quiet_import):
    package = tmp_path / "colossalai"
    package.mkdir()
    for name in ("__init__.py", "booster.py"):
        (package / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    compile_threads = quiet_import()
    assert "colossalai.booster" in sys.modules
    # Each further one would be a process of torch 2.5, in every rank.
    assert compile_threads == 1
