"""The shape that the options of a bench make, on a CPU and on CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from benchmarks.shape_options import ShapeOptions, check_bf16
from gptscale.common.errors import ConfigError
from gptscale.common.settings.gpt_config import PRESETS, GPTConfig


@dataclass(frozen=True)
class BenchOptions(ShapeOptions):
    """The options of a bench whose small shape has two layers, and which adds a number of its own."""

    CPU_SHAPE = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=301)

    repeats: int = 3


@pytest.fixture
def with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_cuda")
def test_on_a_cpu_the_shape_is_small_and_every_size_can_be_changed():
    assert BenchOptions().gpt() == BenchOptions.CPU_SHAPE
    changed = BenchOptions(hidden=64, layers=5, heads=8, seq_len=7, vocab_size=99).gpt()
    assert (changed.n_embd, changed.n_layer, changed.n_head, changed.block_size, changed.vocab_size) == (
        64,
        5,
        8,
        7,
        99,
    )
    assert BenchOptions(model="gpt2", layers=1).gpt().n_embd == PRESETS["gpt2"].n_embd
    with pytest.raises(ConfigError, match="no CUDA device is visible, in --device cuda"):
        BenchOptions(device="cuda").on_cuda()


@pytest.mark.usefixtures("with_cuda")
def test_on_cuda_it_is_the_large_model_unless_the_cpu_is_asked_for():
    assert BenchOptions().gpt() == PRESETS["1.6b"]
    assert BenchOptions(device="cpu").gpt() == BenchOptions.CPU_SHAPE
    with pytest.raises(ConfigError, match="use --dtype fp16"):
        check_bf16("bf16", True, "fp16")
    check_bf16("fp32", True, "fp16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gtp2"}, "did you mean 'gpt2'"),
        ({"hidden": 0}, "hidden 0 is out of range"),
        ({"threads": 1025}, "threads 1025 is out of range, in --threads, use 1 to 1024"),
        # A number that a bench adds is checked with them.
        ({"repeats": -1}, "repeats -1 is out of range"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BenchOptions(**options)


@pytest.mark.usefixtures("without_cuda")
def test_heads_that_do_not_divide_the_hidden_size_are_refused():
    with pytest.raises(ConfigError, match="n_embd 30 is not divisible by n_head 4"):
        BenchOptions(hidden=30).gpt()
