"""A calibration on a GPU: everything is asked for, and under the mock of CUDA no figure is kept."""

import pytest
import torch

from gptscale.common.errors import ConfigError
from gptscale.common.process.mock import is_mock
from gptscale.common.process.world import World
from gptscale.foresight.calibrate import file, worker

SHAPE = {"model": "tiny", "n_layer": 2, "seq_len": 32, "micro_batch_size": 2, "precision": "bf16"}


@pytest.mark.gpu
def test_a_gpu_is_measured_and_a_mock_of_one_leaves_no_figures(tmp_path):
    world = World(0, 0, 1, torch.device("cuda", 0), 60.0)
    out = tmp_path / "calibration.json"
    task = worker.CalibrationTask([SHAPE], str(out), tp=(1, 2), device="cuda", repeats=3)
    measured = worker.measure(task, world)
    kinds = {timed.operation.kind for timed in measured.operations}
    missing = {"product", "attention backward", "pass", "copy"} - kinds
    if missing:
        raise RuntimeError(f"not measured: {missing}")
    if is_mock():
        with pytest.raises(ConfigError, match="computes nothing"):
            file.add(out, measured)
        if out.exists():
            raise RuntimeError("figures of a mock were kept")
