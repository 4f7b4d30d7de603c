"""Colossal-AI's dropout as a function of step and rank, and the wrapper around its model. Worlds test the engines."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gptscale.common.engines.colossal.hybrid import BoostedModel, DropoutStreams, time_schedule


class ParallelDropout(nn.Dropout):
    """A dropout with random numbers of its own, as each parallel layer of Colossal-AI has them. Here they are their seed."""

    randomizer = 0


@pytest.fixture
def draws(monkeypatch):
    """Return a function that returns the seeds of two attention dropouts, and a number of the stream that all ranks share."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group)

    def draw(step=0, data_rank=0, tp_rank=0, stage=0, seed=1):
        model = nn.Sequential(ParallelDropout(), nn.Dropout(), ParallelDropout())
        run = SimpleNamespace(config=SimpleNamespace(seed=seed))
        DropoutStreams(run, SimpleNamespace(tp_group=tp_rank, pp_group=stage), model).start(step, data_rank)
        return [model[0].randomizer, model[2].randomizer], torch.rand(()).item()

    return draw


@pytest.mark.parametrize("other", [{"step": 1}, {"data_rank": 1}, {"stage": 1}, {"seed": 2}, {"tp_rank": 1}])
def test_each_other_step_rank_stage_and_seed_draws_otherwise(other, draws):
    (seeds, shared), (other_seeds, other_shared) = draws(), draws(**other)
    assert len({*seeds, *other_seeds}) == 4
    # Tensor ranks share the residual stream, and have heads of their own.
    assert (shared == other_shared) == ("tp_rank" in other)
    assert draws() == (seeds, shared)


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


class Clock:
    """Write down what it is asked to time."""

    def __init__(self):
        self.timed = []

    @contextmanager
    def computing(self, kind, stage, micro_batch):
        self.timed.append((kind, stage, micro_batch))
        yield


def schedule(*, is_interleave, chunks, **options):
    manager = SimpleNamespace(is_interleave=is_interleave, num_model_chunks=chunks, num_stages=2, stage=1)
    steps = {name: lambda *a: "result" for name in ("forward_step", "backward_step")}
    return SimpleNamespace(stage_manager=manager, forward_only=False, **steps, **options)


def test_one_chunk_counts_micro_batches_from_0_in_every_step():
    one, clock = schedule(is_interleave=False, chunks=1, num_microbatches=2), Clock()
    time_schedule(one, clock)
    one.forward_only = True
    assert one.forward_step(0) == "result"
    # An evaluation is not timed.
    assert clock.timed == []
    one.forward_only = False
    assert [one.forward_step(0) for _ in range(3)] == ["result"] * 3
    one.backward_step(0)
    assert [(stage, micro_batch) for _, stage, micro_batch in clock.timed] == [(1, 0), (1, 1), (1, 0), (1, 0)]


def test_several_chunks_are_stages_of_their_own():
    def chunk_of(call, is_forward):
        return [0, 0, 1, 1][call]

    two, clock = schedule(is_interleave=True, chunks=2, num_microbatch=2, get_model_chunk_id=chunk_of), Clock()
    time_schedule(two, clock)
    for _ in range(4):
        two.forward_step()
    assert [(stage, micro_batch) for _, stage, micro_batch in clock.timed] == [(1, 0), (1, 1), (3, 0), (3, 1)]
