"""A calibration on a GPU: everything is asked for, and under the mock of CUDA no figure is kept."""

import pytest
import torch

from gptscale.common.errors import ConfigError
from gptscale.common.process.mock import is_mock
from gptscale.common.process.world import World
from gptscale.foresight.calibrate import file, worker
from gptscale.foresight.calibrate.options import CalibrateOptions
from gptscale.foresight.calibrate.worker import group_shapes


@pytest.mark.gpu
def test_a_gpu_is_measured_and_a_mock_of_one_leaves_no_figures(tmp_path):
    world = World(0, 0, 1, torch.device("cuda", 0), 60.0)
    out = tmp_path / "calibration.json"
    shape = {"model": "tiny", "n_layer": 2, "seq_len": 32, "micro_batch_size": "2", "precision": "bf16"}
    measured = worker.measure(CalibrateOptions(**shape, tp="1,2", device="cuda", repeats=3), world)
    kinds = {timed.operation.kind for timed in measured.operations}
    missing = {"product", "attention backward", "pass", "copy"} - kinds
    if missing:
        raise RuntimeError(f"not measured: {missing}")
    if is_mock():
        with pytest.raises(ConfigError, match="computes nothing"):
            file.add(out, measured)
        if out.exists():
            raise RuntimeError("figures of a mock were kept")


@pytest.mark.parametrize(("world", "per_node"), [(2, 2), (8, 8), (16, 8), (12, 4)])
def test_the_groups_of_every_split_are_measured(world, per_node):
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for tp in divisors:
        for dp in (n for n in divisors if n > 1 and world % (n * tp) == 0):
            members = [tp * i for i in range(dp)]
            on_node = sum(member < per_node for member in members)
            assert (dp, on_node) in group_shapes(world, per_node)
