"""The process that started a worker tells how it ended. Workers here are scripts of a line or two."""

import os

import pytest

from benchmarks import task as worker
from benchmarks.task import run_worker
from gptscale.common.errors import GptscaleError
from gptscale.common.process.task import reason

CUDA = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
DYNAMO = """torch._dynamo.exc.Unsupported: generator

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if you're reporting a bug to PyTorch).
"""
CHAINED = """KeyError: 'shape'
During handling of the above exception, another exception occurred:
triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 2, Hardware limit: 1
"""
SAID = {
    CUDA: "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    DYNAMO: "torch._dynamo.exc.Unsupported: generator",
    CHAINED: "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 2, Hardware limit: 1",
    "KeyboardInterrupt\nbye\n": "KeyboardInterrupt",
    "gptscale: error: no such device\nbye\n": "gptscale: error: no such device",
    "free(): invalid pointer\n": "free(): invalid pointer",
    "KeyError: 'odd'\nRuntimeError: \n[Stage 1] failed to run forward\nRuntimeError: [tcp/pair.cc:561] Connection closed by peer\n": "KeyError: 'odd'",
    "": "no message",
}


@pytest.mark.parametrize("stderr", SAID)
def test_the_reason_is_the_exceptions_line(stderr):
    assert reason(stderr) == SAID[stderr]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a worker's code, and return the name of its module."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    # Without it tokenizers writes a warning into a fork's stderr, if another test of this process has used them.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")

    def write(code):
        (tmp_path / "a_worker.py").write_text(f"import json, sys, time; task = json.loads(sys.argv[1])\n{code}")
        return "a_worker"

    return write


def test_the_last_line_is_the_result(module, capfd):
    code = "print('noise'); print('warning', file=sys.stderr); print(json.dumps({'twice': 2 * task['n']}))"
    assert run_worker(module(code), {"contender": "c", "n": 4}) == {"twice": 8}
    assert capfd.readouterr().err == ""


def test_a_worker_that_fails_is_heard(module, capfd):
    code = "print(*range(500), sep='\\n', file=sys.stderr); raise ValueError('odd')"
    with pytest.raises(GptscaleError, match=r"c failed \(ValueError: odd\), in bench"):
        run_worker(module(code), {"contender": "c"})
    heard = capfd.readouterr().err.splitlines()
    assert len(heard) == 100
    assert "499" in heard
    assert heard[-1] == "ValueError: odd"


def test_a_worker_that_hangs_is_heard_too(module, monkeypatch, capfd):
    monkeypatch.setattr(worker, "LIMIT_S", 15.0)
    code = "print('compiling', file=sys.stderr, flush=True); time.sleep(60)"
    with pytest.raises(GptscaleError, match="c took more than 15 s"):
        run_worker(module(code), {"contender": "c"})
    assert capfd.readouterr().err == "compiling\n"
