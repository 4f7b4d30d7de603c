"""Time the host's part of a step: the loop, the reader, the recorder and an engine whose model computes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptscale.common.data.loader import Batches, Prefetcher
from gptscale.common.data.sources import open_source
from gptscale.common.engines.torch_engine import TorchEngine
from gptscale.common.measure.live_state import StateTensor
from gptscale.common.optim.stepper import Stepper
from gptscale.common.settings.run import Run
from gptscale.common.state import Shard
from gptscale.common.train import train
from gptscale.foresight.calibrate.timing import Timing, summary
from gptscale.results.record.recorder import Recorder

STEPS = 40


class NoModel(nn.Module):
    """A model of one parameter."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), device=device))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return a loss that is the parameter."""
        return self.weight * 1.0


class NoStep(Stepper):
    """A stepper that does nothing."""

    def step(self, lr: float, loss: Tensor) -> Tensor:
        return loss

    def state(self) -> Iterable[Shard]:
        return ()

    def state_tensors(self) -> Iterable[StateTensor]:
        return ()

    def counters(self) -> dict[str, float]:
        return {}

    def load_counters(self, counters: dict[str, float]) -> None:
        pass


def time_host(run: Run, folder: Path) -> Timing:
    """Return the seconds of a step in which nothing is computed, on all ranks of the default process group."""
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, steps=STEPS))
    group = dist.group.WORLD if dist.is_initialized() else None
    engine = TorchEngine(run, NoModel(run.world.device), NoStep(run.world.device), group=group)
    source = open_source("synthetic", tokenizer="bytes", vocab_size=run.gpt.vocab_size, seed=run.config.seed)
    batches = Batches(
        source,
        seq_len=run.seq_len,
        global_batch_size=run.batch.micro_batch_size * engine.data_size,
        seed=run.config.seed,
        data_rank=engine.data_rank,
        data_size=engine.data_size,
    )
    own = folder / f"host-{run.world.rank}"
    own.mkdir(parents=True, exist_ok=True)
    with (
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
        Recorder(run, own) as recorder,
        Prefetcher(batches, run.world.device) as data,
    ):
        train(engine, data, recorder, lr_at=run.lr_at, start=0, steps=STEPS)
    return summary({"host": recorder.step_times_s[STEPS // 4 :]})["host"]
