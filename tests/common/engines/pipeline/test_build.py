"""Building a pipeline: which stages a process makes, without memory, and the shapes of what they exchange."""

from types import SimpleNamespace

import pytest
import torch

from gptscale.common.engines.pipeline.build import parts_of, shapes_of
from gptscale.common.model.build import materialise
from gptscale.common.process.world import World
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig

CPU = torch.device("cpu")


def run_of(pp_size, **options):
    config = RunConfig(n_layer=7, n_embd=16, n_head=2, vocab_size=30, seq_len=8, pp_size=pp_size, **options)
    return Run("pipeline", config, config.gpt(), plan_batch(1, 8, grad_accum_steps=4), World(0, 0, pp_size, CPU, 60.0))


def options_of(schedule, layers="balanced"):
    return SimpleNamespace(schedule=schedule, stages_per_rank=0, layers_per_stage=layers)


@pytest.mark.parametrize(
    ("schedule", "layers", "blocks"),
    [
        ("1F1B", "4,3", [{0: "0123"}, {1: "456"}]),
        ("Interleaved1F1B", "2,2,2,1", [{0: "01", 2: "45"}, {1: "23", 3: "6"}]),
        ("ZBVZeroBubble", "2,2,2,1", [{0: "01", 3: "6"}, {1: "23", 2: "45"}]),
    ],
)
def test_a_process_makes_its_stages_alone_on_the_meta_device(schedule, layers, blocks):
    for rank, expected in enumerate(blocks):
        parts = parts_of(run_of(2), options_of(schedule, layers), rank)
        assert {index: "".join(part.blocks) for index, part in parts.items()} == expected
        assert all(p.is_meta for part in parts.values() for p in part.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_are_those_that_the_stages_return(dtype):
    run = run_of(2)
    parts = {**parts_of(run, options_of("1F1B"), 0), **parts_of(run, options_of("1F1B"), 1)}
    shapes, targets = shapes_of(run, 2, dtype), torch.zeros(2, 8, dtype=torch.int64)
    for index, part in parts.items():
        inputs, outputs = shapes(index)
        returned = materialise(part, run, CPU).to(dtype)(torch.zeros_like(inputs, device=CPU), targets)
        assert returned.shape == outputs.shape
        # The loss is fp32 whatever the activations are.
        assert returned.dtype == (outputs.dtype if index == 0 else torch.float32)
    assert shapes(0)[1].dtype == shapes(1)[0].dtype == dtype


def test_a_tensor_rank_passes_on_its_part_of_the_sequence():
    shapes = shapes_of(run_of(2, tp_size=4), 3, torch.float32)
    assert [tuple(t.shape) for t in shapes(1)] == [(2, 2, 16), (2, 2, 16)]
    # Ids are whole on every tensor rank.
    assert [tuple(t.shape) for t in shapes(0)] == [(2, 8), (2, 2, 16)]
    assert shapes(2)[1].shape == ()
