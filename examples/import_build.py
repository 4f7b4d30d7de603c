"""Way 3: `build` and the loop imported, for data of one's own.

torchrun --standalone --nproc-per-node 2 examples/import_build.py
"""

import os
from contextlib import nullcontext

import torch

from gptscale.common.data.loader import to_device
from gptscale.common.engine import Batch, StepResult
from gptscale.common.process.world import World, process_group
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.train import train
from gptscale.recipes.fsdp import FSDPConfig, build


class Alphabet:
    """A data source has one method. This one says the alphabet, from a letter that differs by step, rank and sequence."""

    def __init__(self, data_rank: int, sequences: int, seq_len: int, device: torch.device) -> None:
        self.data_rank, self.sequences, self.seq_len, self.device = data_rank, sequences, seq_len, device

    def get(self, step: int) -> Batch:
        first = 7 * step + 5 * self.data_rank + torch.arange(self.sequences)
        letters = ord("a") + (first.unsqueeze(1) + torch.arange(self.seq_len + 1)) % 26
        return to_device(Batch(step, letters[:, :-1], letters[:, 1:]), self.device)


class Printer:
    """An observer has four methods; one that only prints needs three of them to do nothing."""

    def __init__(self, is_main: bool) -> None:
        self.is_main = is_main

    def waiting(self):
        return nullcontext()

    def paused(self):
        return nullcontext()

    def evaluated(self, step: int, loss: torch.Tensor) -> None:
        pass

    def step(self, step: int, lr: float, result: StepResult) -> bool:
        loss = result.loss.item()
        if self.is_main and step % 10 == 1:
            print(f"step {step} loss {loss:.4f}", flush=True)
        return True


def main() -> None:
    config = RunConfig(model="tiny", seq_len=32, global_batch_size=8, steps=31, lr=3e-3)
    world = World.from_environment(config.device, config.dist_timeout_s)
    torch.set_num_threads(1)
    with process_group(world):
        batch = plan_batch(world.world_size, global_batch_size=config.global_batch_size)
        run = Run("fsdp", config, config.gpt(), batch, world)
        engine = build(run, FSDPConfig())
        data = Alphabet(engine.data_rank, batch.sequences_per_rank, run.seq_len, world.device)
        train(engine, data, Printer(world.is_main), lr_at=run.lr_at, start=0, steps=config.steps)


if __name__ == "__main__":
    main()
    os._exit(0)  # done; torch's autograd threads can abort an interpreter's teardown, now and then
