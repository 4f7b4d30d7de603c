"""The torch engine: what it imports, and what it takes from its Stepper."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

from gptscale.common.engines.torch_engine import TorchEngine, holding_back
from gptscale.common.optim.stepper import Stepper
from gptscale.common.process.world import World
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get

HEAVY = ("torch.distributed.pipelining", "torch.distributed.tensor", "safetensors", "deepspeed", "colossalai")


def test_a_run_without_them_imports_no_heavy_modules():
    """Nor does naming the state of plain tensors, or having a checkpoint's reader at hand."""
    code = f"""
import sys, torch
from gptscale.common.checkpoint import reader, writer
from gptscale.common.engines import torch_engine
from gptscale.common.optim import fused, library
from gptscale.common.state import replicas, shard_of
for tensor in (torch.zeros(2), torch.nn.Parameter(torch.zeros(2))):
    assert shard_of("x", tensor).offset == (0,) and replicas(tensor) == 1
print([name for name in {HEAVY} if name in sys.modules])
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    assert process.stdout.strip() == "[]"


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
    engine = TorchEngine(SimpleNamespace(), torch.nn.Identity(), stepper)
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
