"""The loop with a fake engine, without processes or a model. The fake also proves how little an engine must have."""

import ast
import inspect
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from gptscale.common import train as train_module
from gptscale.common.engine import Batch, Engine, StepResult
from gptscale.common.train import train

EMPTY = torch.empty(1, 1, dtype=torch.int64)
DATA = SimpleNamespace(get=lambda step: Batch(step, EMPTY, EMPTY))


class FakeEngine(Engine):
    data_rank, data_size = 0, 1

    def __init__(self):
        self.seen = []

    def train_step(self, batch, lr):
        self.seen.append((batch.step, lr))
        return StepResult(torch.tensor(1.0 / (batch.step + 1)), torch.tensor(1.0), torch.tensor([1.0]))

    def eval_loss(self, batch):
        return torch.tensor(2.0)

    def state(self):
        return iter(())

    def counters(self):
        return {}

    def load_counters(self, counters):
        pass


class FakeObserver:
    def __init__(self, window=1):
        self.window, self.steps, self.evals = window, [], []

    def waiting(self):
        return nullcontext()

    def paused(self):
        return nullcontext()

    def step(self, step, lr, result):
        self.steps.append(step)
        return step % self.window == 0

    def evaluated(self, step, loss):
        self.evals.append((step, loss))


def test_asks_for_each_step_once_in_order_and_evaluates_when_due():
    engine, observer, saves = FakeEngine(), FakeObserver(), []
    last = train(engine, DATA, observer, lr_at=lambda s: 10.0 * s, start=3, steps=7,
                 evaluate=lambda s: torch.tensor(2.0) if s % 2 == 0 else None,
                 save=lambda s, last: saves.append((s, last)))  # fmt: skip
    assert last == 7
    assert engine.seen == [(3, 30.0), (4, 40.0), (5, 50.0), (6, 60.0)]
    assert observer.steps == [4, 5, 6, 7]
    assert observer.evals == [(4, 2.0), (6, 2.0)]
    assert saves == [(4, False), (5, False), (6, False), (7, True)]


def test_stops_only_where_the_observer_synchronised_and_saves_as_the_last():
    engine, saves = FakeEngine(), []
    last = train(engine, DATA, FakeObserver(window=4), lr_at=lambda s: 1.0, start=0, steps=100,
                 save=lambda s, last: saves.append((s, last)), stop_requested=lambda: len(engine.seen) >= 6)  # fmt: skip
    assert last == 8
    assert saves[-1] == (8, True)


def test_the_loop_knows_no_strategy():
    calls = [node.func for node in ast.walk(ast.parse(inspect.getsource(train))) if isinstance(node, ast.Call)]
    assert not {ast.unparse(function) for function in calls} & {"isinstance", "hasattr", "getattr", "type"}
    words = inspect.getsource(train_module).lower()
    assert not [name for name in ("ddp", "fsdp", "deepspeed", "fairscale", "colossal", "pipeline") if name in words]
