"""The one training loop. It asks an engine for steps, and never which strategy the engine is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from gptscale.common.engine import Batch, Engine, StepResult
from gptscale.common.process.world import agree_any


class Source(Protocol):
    """The data of a run: this process's share of the global batch of any 0-based step."""

    def get(self, step: int) -> Batch: ...


class Observer(Protocol):
    """What the loop reports to. results/record/recorder.py writes it down."""

    def waiting(self) -> AbstractContextManager[None]: ...
    def step(self, step: int, lr: float, result: StepResult) -> bool: ...
    def evaluated(self, step: int, loss: Tensor) -> None: ...
    def paused(self) -> AbstractContextManager[None]: ...


def train(
    engine: Engine,
    data: Source,
    observer: Observer,
    *,
    lr_at: Callable[[int], float],
    start: int,
    steps: int,
    evaluate: Callable[[int], Tensor | None] = lambda step: None,
    save: Callable[[int, bool], None] = lambda step, last: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> int:
    """Run optimizer steps `start`+1 to `steps`, and return the last one done.

    evaluate(step), save(step, last): called after every step; they decide themselves whether they are due.
    stop_requested: asked whenever the observer has synchronised, that is when its `step` returned True. When any process
    answers yes, all of them stop after the same step. A NumericError that the observer raises ends the run at once.
    """
    for step in range(start, steps):
        with observer.waiting():
            batch = data.get(step)
        lr = lr_at(step)
        synchronised = observer.step(step + 1, lr, engine.train_step(batch, lr))
        with observer.paused():
            if (loss := evaluate(step + 1)) is not None:
                observer.evaluated(step + 1, loss)
            stop = synchronised and agree_any(stop_requested())
            save(step + 1, stop or step + 1 == steps)
        if stop:
            return step + 1
    return steps
