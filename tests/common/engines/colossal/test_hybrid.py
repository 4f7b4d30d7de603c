"""Colossal-AI's dropout as a function of step and rank, and the wrapper around its model. Worlds test the engines."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gptscale.common.engines.colossal.hybrid import BoostedModel, DropoutStreams


class Randomizer:
    """A stream of random numbers, as each parallel layer of Colossal-AI has one."""

    def __init__(self, seed):
        self.seed = seed


class ParallelDropout(nn.Dropout):
    """A dropout whose stream is another on each tensor rank."""

    def __init__(self):
        super().__init__()
        self.randomizer = Randomizer(0)


@pytest.fixture
def draws(monkeypatch):
    """Return a function that returns the seeds of two attention dropouts, and a number of the stream that all ranks share."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group)

    def draw(step=0, data_rank=0, tp_rank=0, stage=0, seed=1):
        model = nn.Sequential(ParallelDropout(), nn.Dropout(), ParallelDropout())
        run = SimpleNamespace(config=SimpleNamespace(seed=seed))
        DropoutStreams(run, SimpleNamespace(tp_group=tp_rank, pp_group=stage), model).start(step, data_rank)
        return [model[0].randomizer.seed, model[2].randomizer.seed], torch.rand(()).item()

    return draw


def test_a_step_begun_again_draws_the_same(draws):
    assert draws(step=7) == draws(step=7)


@pytest.mark.parametrize("other", [{"step": 1}, {"data_rank": 1}, {"stage": 1}, {"seed": 2}])
def test_other_steps_data_ranks_stages_and_seeds_draw_otherwise(other, draws):
    (seeds, shared), (other_seeds, other_shared) = draws(), draws(**other)
    assert not set(seeds) & set(other_seeds)
    assert shared != other_shared


def test_tensor_ranks_share_the_residual_stream_and_have_other_heads(draws):
    (seeds, shared), (other_seeds, other_shared) = draws(tp_rank=0), draws(tp_rank=1)
    assert shared == other_shared
    assert len({*seeds, *other_seeds}) == 4


def test_streams_begin_once_before_the_next_micro_batch():
    began = []
    model = BoostedModel(lambda inputs, targets: inputs.sum() * 2)
    model.begin = lambda: began.append(True)
    assert [model(torch.ones(3), None).item() for _ in range(2)] == [6.0, 6.0]
    assert began == [True]


def test_colossal_ai_casts_by_itself():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = BoostedModel(lambda inputs, targets: inputs @ inputs)(torch.ones(2, 2), None)
    assert loss.dtype == torch.float32
