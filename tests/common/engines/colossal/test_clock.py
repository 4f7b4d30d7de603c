"""Colossal-AI's schedule timed: which stage and micro-batch each of its calls is."""

from contextlib import contextmanager
from types import SimpleNamespace

from gptscale.common.engines.colossal.clock import time_schedule


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
    assert [stage for _, stage, _ in clock.timed] == [1] * 4
    assert [micro_batch for *_, micro_batch in clock.timed] == [0, 1, 0, 0]


def test_several_chunks_are_stages_of_their_own():
    def chunk_of(call, is_forward):
        return [0, 0, 1, 1][call]

    two, clock = schedule(is_interleave=True, chunks=2, num_microbatch=2, get_model_chunk_id=chunk_of), Clock()
    time_schedule(two, clock)
    for _ in range(4):
        two.forward_step()
    assert [(stage, micro_batch) for _, stage, micro_batch in clock.timed] == [(1, 0), (1, 1), (3, 0), (3, 1)]
