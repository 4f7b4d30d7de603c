"""Contenders of `python -m benchmarks.model` one by one."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from benchmarks.model import contenders as model_contenders
from benchmarks.model import worker as model_worker
from benchmarks.model.options import ContenderResult, ModelBenchOptions, check_losses, resolve
from gptscale.common.errors import GptscaleError
from gptscale.common.settings.gpt_config import GPTConfig

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=301)


@pytest.mark.slow
def test_gelu_in_the_products_epilogues_does_the_same_work(in_process, monkeypatch):
    """On a CPU torch's operations stand for them. An operator that is not the MLP is seen."""
    monkeypatch.setattr(model_contenders.MLP, "forward", model_contenders.MLP.forward)
    options = ModelBenchOptions(device="cpu", dtype="bf16", steps=3, threads=1, batch_size=2)
    bench = dataclasses.replace(resolve(options), gpt=TINY)

    def run(name):
        # Each run begins as in a process of its own.
        torch._dynamo.reset()
        result = ContenderResult(name)
        result.add_turn(in_process("benchmarks.model.worker", bench.task(name, profile=True)))
        assert result.parts["matrix products"] > 0
        return result

    single = run("single_compiled")
    check_losses([single, run("single_epilogues")], 3e-3)
    right = model_contenders.mlp
    monkeypatch.setattr(model_contenders, "mlp", lambda *args: -20 * right(*args))
    with pytest.raises(GptscaleError, match="in single_epilogues and"):
        check_losses([single, run("single_epilogues")], 3e-3)


def test_the_peak_is_that_of_the_warm_up_too(monkeypatch):
    """A step that is replayed from a CUDA graph allocates nothing."""
    done = []
    monkeypatch.setattr(model_worker, "reset_peak_memory", lambda device: done.append("reset"))
    data = SimpleNamespace(get=lambda i: done.append(i) or torch.zeros(()))
    result = model_worker.timed_steps(lambda loss: loss, data, {"warmup_steps": 2, "steps": 3}, torch.device("cpu"))
    assert done == ["reset", 0, 1, 2, 3, 4]
    assert (len(result["step_times_s"]), len(result["losses"])) == (3, 5)
