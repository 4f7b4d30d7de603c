"""LeNet-5 by this package, with all files of a run, for `python -m benchmarks.lenet`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.task import answer
from gptscale.common.errors import GptscaleError
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.preflight import world_from_environment
from gptscale.lenet.run.worker import train


def train_fast(task: dict[str, Any]) -> dict[str, Any]:
    """Train by this package in this process, with all files of a run, and return the epochs' seconds and the accuracy."""
    torch.set_num_threads(task.pop("threads"))
    del task["contender"]
    with tempfile.TemporaryDirectory() as folder:
        config = VisionConfig(
            **task | {"data_dir": Path(task["data_dir"])}, out=Path(folder), device="cpu", study="bench", verdict=False
        )
        outcome = train(config, world_from_environment(config))
        if outcome.exit_status:
            raise GptscaleError(str(outcome.row["error"]), "in benchmarks.lenet", "see the message above")
        epochs = pd.read_csv(outcome.folder / "epochs.csv")
    n_images = int(outcome.row["n_train"])
    # This package leaves out an incomplete last batch. These are the seconds for as many images as the plain script takes.
    seconds = [n_images / rate for rate in epochs.images_per_s]
    return {"epoch_times_s": seconds, "accuracy": outcome.row["test_accuracy"], "n_images": n_images}


if __name__ == "__main__":
    answer(train_fast)
