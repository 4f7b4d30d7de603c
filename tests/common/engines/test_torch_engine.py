"""The torch engine: what it takes from its Stepper."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from gptscale.common.engines.torch_engine import TorchEngine, holding_back
from gptscale.common.optim.stepper import Stepper
from gptscale.common.process.world import World
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get


class Counting(Stepper):
    """As little as a Stepper must have."""

    def step(self, lr, loss):
        return torch.ones(())

    def state(self):
        return iter(())

    def counters(self):
        return {"optimizer_steps": 2.0}

    def load_counters(self, counters):
        self.loaded = counters

    def state_tensors(self):
        return ()


def test_an_engine_keeps_the_defaults_of_its_stepper():
    stepper = Counting(torch.device("cpu"))
    engine = TorchEngine(SimpleNamespace(cp_size=1), torch.nn.Identity(), stepper)
    assert (engine.data_rank, engine.data_size) == (0, 1)
    assert engine.offload() is None
    assert engine.bubble() is None
    assert engine.close() is None
    engine.load_counters(engine.counters())
    assert stepper.loaded == {"optimizer_steps": 2.0}


def test_a_step_drops_by_its_number_and_the_rank_alone(tmp_path):
    words = ["--dropout", "0.5", "--data", "synthetic", "--seq-len", "16", "--n-layer", "1", "--out", str(tmp_path)]
    plan = preflight("single", *parse_run("single", words), World.from_environment("cpu"))
    batch = plan.batches(plan.train, 0, 1).batch(0)

    def loss(step, rank):
        world = replace(plan.run.world, rank=rank)
        engine = get("single").load().build(replace(plan.run, world=world), plan.recipe_config)
        return engine.train_step(batch._replace(step=step), 0.0).loss.item()

    assert loss(0, 0) == loss(0, 0)
    assert len({loss(0, 0), loss(1, 0), loss(0, 1)}) == 3


def test_gradients_are_held_back_until_the_last_micro_batch():
    calls = []

    class NoSync:
        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *error):
            calls.append("exit")

    set_grad_sync = holding_back(NoSync)
    for on in (False, False, True):
        set_grad_sync(on)
        calls.append(on)
    assert calls == ["enter", False, "exit", "enter", False, "exit", True]
