"""The torch engine: what it imports, and what it takes from its Stepper."""

import subprocess
import sys
from types import SimpleNamespace

import torch

from gptscale.common.engines.torch_engine import TorchEngine, holding_back
from gptscale.common.optim.stepper import Stepper

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
