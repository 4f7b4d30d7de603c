"""Contenders of `python -m benchmarks.model` one by one."""

from types import SimpleNamespace

import torch

from benchmarks.model import worker as model_worker
from gptscale.common.settings.gpt_config import GPTConfig

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=301)


def test_the_peak_is_that_of_the_warm_up_too(monkeypatch):
    """A step that is replayed from a CUDA graph allocates nothing."""
    done = []
    monkeypatch.setattr(model_worker, "reset_peak_memory", lambda device: done.append("reset"))
    data = SimpleNamespace(get=lambda i: done.append(i) or torch.zeros(()))
    result = model_worker.timed_steps(lambda loss: loss, data, {"warmup_steps": 2, "steps": 3}, torch.device("cpu"))
    assert done == ["reset", 0, 1, 2, 3, 4]
    assert (len(result["step_times_s"]), len(result["losses"])) == (3, 5)
