"""Vision runs in this process, what they leave, and engines that are asked to stop or harmed at a step."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from worlds import assert_same_state

from gptscale.common.checkpoint.reader import step_folders
from gptscale.common.engine import Batch
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import world_from_environment
from gptscale.lenet.run.worker import RunOutcome, train

# Everything that has a state: dropout, batch norm, augmentation and Adam.
LONG = {"model": "cnn", "epochs": 3, "batch_size": 16, "save_every": 1, "lr_schedule": "onecycle"}


def run(tmp_path: Path, name: str, **options: Any) -> RunOutcome:
    """Train a run in this process, without the further steps of a verdict."""
    shared = {"out": tmp_path, "run_name": name, "device": "cpu", "tensorboard": False, "verdict": False}
    config = VisionConfig(**(shared | options))
    return train(config, world_from_environment(config))


def table(outcome: RunOutcome, name: str = "steps.csv") -> pd.DataFrame:
    """Return a table of a run's folder."""
    return pd.read_csv(outcome.folder / name, float_precision="round_trip")


def assert_same_end(a: Path, b: Path) -> None:
    """Compare the newest checkpoints of two runs bit by bit."""
    newest = [step_folders(folder / "checkpoints")[0] for folder in (a, b)]
    assert newest[0].name == newest[1].name
    assert_same_state(*newest)


def loss_and_gradient(net: nn.Module, channels: int, side: int) -> tuple[float, torch.Tensor]:
    """Return the loss of a net without dropout on eight images, and its gradients as one vector."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, channels, side, side, generator=generator)
    labels = torch.randint(0, 10, (8,), generator=generator)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    loss = F.cross_entropy(net(images), labels)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@contextlib.contextmanager
def asked_to_stop(step: int) -> Iterator[None]:
    """Send SIGTERM to this process in 0-based `step` of each run."""
    original = VisionEngine.loss

    def asked(self: VisionEngine, batch: Batch) -> torch.Tensor:
        if batch.step == step:
            signal.raise_signal(signal.SIGTERM)
        return original(self, batch)

    with mock.patch.object(VisionEngine, "loss", asked):
        yield


@contextlib.contextmanager
def harmed(step: int, seed: int = 1234) -> Iterator[None]:
    """Make the images of 0-based `step` infinite in runs of `seed`."""
    original = VisionEngine.loss

    def harm(self: VisionEngine, batch: Batch) -> torch.Tensor:
        factor = float("inf") if (batch.step, self.config.seed) == (step, seed) else 1.0
        return original(self, batch._replace(inputs=batch.inputs * factor))

    with mock.patch.object(VisionEngine, "loss", harm):
        yield
