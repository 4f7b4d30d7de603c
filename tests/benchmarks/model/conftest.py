"""Contenders of `python -m benchmarks.model` without processes of their own."""

import functools
import json

import pytest
import torch

from benchmarks import timing
from benchmarks.model import __main__ as bench_model
from benchmarks.model import contenders as model_contenders
from benchmarks.model import worker as model_worker


@pytest.fixture
def in_process(monkeypatch):
    """Contenders as functions of this process: the same code without starting Python twelve times."""

    def run_worker(module, task):
        assert module == "benchmarks.model.worker"
        return json.loads(json.dumps(model_worker.main(json.loads(json.dumps(task)))))

    monkeypatch.setattr(bench_model, "run_worker", run_worker)
    monkeypatch.setattr(model_contenders, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(timing, "ROUND_S", 1e-4)
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**20)
    # the compiler's front end, without its back end's minutes of C++
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield run_worker
    torch._dynamo.reset()
