"""The arithmetic of Colossal-AI's pipelines: their schedules, and how stages share the blocks."""

import subprocess

import pytest
import torch

from gptscale.common.engines.colossal.checks import bubble_fraction, default_micro_batches, stage_sizes
from gptscale.common.engines.rank_shapes import stage_of
from gptscale.common.process import environments
from gptscale.common.process.world import World
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.recipes.colossal_hybrid import ColossalPipelineConfig


def test_arithmetic_of_a_pipeline():
    assert bubble_fraction(4, 1, 8) == 3 / 11
    assert bubble_fraction(2, 2, 4) == 1 / 9
    assert default_micro_batches("1f1b", 2, 8) == 4
    assert default_micro_batches("interleaved", 2, 6) == 2
    assert default_micro_batches("1f1b", 1, 8) is None


CPU = torch.device("cpu")
SHARES = {
    (36, 8, 1): [4, 4, 5, 5, 5, 5, 4, 4],
    (50, 8, 1): [6, 6, 6, 7, 7, 6, 6, 6],
    (51, 4, 1): [12, 13, 13, 13],
    (48, 8, 1): [6] * 8,
    (10, 2, 2): [2, 3, 3, 2],
}


@pytest.mark.parametrize("split", SHARES)
def test_blocks_that_are_over_go_to_the_middle(split):
    n_layer, stages, chunks = split
    assert stage_sizes(*split) == SHARES[split]
    config = ColossalPipelineConfig(schedule="interleaved" if chunks > 1 else "1f1b", num_model_chunks=max(chunks, 2))
    options, batch = RunConfig(n_layer=n_layer, pp_size=stages), plan_batch(1)
    runs = [Run("", options, options.gpt(), batch, World(rank, rank, stages, CPU, 60.0)) for rank in range(stages)]
    held = [stage_of(run, config)[2] for run in runs]
    assert held == [sum(SHARES[split][rank::stages]) for rank in range(stages)]


LIBRARY = """
from types import SimpleNamespace
from colossalai.pipeline.stage_manager import PipelineStageManager
from gptscale.common.engines.colossal.checks import stage_sizes

splits = [(n, p, v) for n in range(1, 60) for p in range(1, 9) for v in range(1, 5) if n >= p * v]
for n, p, v in splits:
    manager = SimpleNamespace(num_layers_per_stage=None, num_stages=p, num_model_chunks=v)
    assert PipelineStageManager.distribute_layers(manager, n) == stage_sizes(n, p, v), (n, p, v)
"""


@pytest.mark.skipif(not environments.installed("colossalai", "colossalai"), reason="needs Colossal-AI's environment")
def test_the_library_shares_blocks_alike():
    subprocess.run([environments.python("colossalai"), "-c", LIBRARY], check=True, timeout=300)
