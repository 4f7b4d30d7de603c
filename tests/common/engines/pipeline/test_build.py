"""Building a pipeline: which stages a process makes, without memory, and the shapes of what they exchange."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptscale.common.engines.pipeline.build import parts_of, shapes_of, stages_of, tied_embedding_group
from gptscale.common.engines.pipeline.engine import PipelineLoss
from gptscale.common.engines.pipeline.stages import balanced, describe_stages, fits
from gptscale.common.model.build import materialise
from gptscale.common.model.gpt import GPT
from gptscale.common.process.world import World
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.gpt_config import PRESETS
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


@pytest.mark.parametrize("sizes", [[7], [4, 3], [2, 3, 2], [4, 3, 0]])
def test_stages_in_turn_compute_the_loss_and_gradients_of_the_model(sizes):
    torch.manual_seed(0)
    gpt = GPT(run_of(1).gpt)
    ids = torch.randint(0, 30, (2, 9), generator=torch.Generator().manual_seed(1))
    loss = gpt(ids[:, :-1], ids[:, 1:])
    loss.backward()
    expected = {name: p.grad.clone() for name, p in gpt.named_parameters()}
    gpt.zero_grad()
    stages = stages_of(gpt, sizes, range(len(sizes)))
    x = ids[:, :-1]
    for stage in stages:
        x = stage(x, ids[:, 1:])
    x.backward()
    assert torch.equal(x, loss)
    # The table, which the two ends share here as they do not in a world, is there under its name.
    gradients = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("sizes", "ends"),
    # (pp, dp): ranks 0 and 1 are the first stages of two pipelines.
    [((3, 2), [[0, 4], [1, 5], None, None, [0, 4], [1, 5]]), ((1, 2), [None, None])],
)
def test_the_two_ends_of_each_pipeline_share_the_table(sizes, ends):
    for rank, expected in enumerate(ends):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(ends))
        try:
            group = tied_embedding_group(init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp")))
            assert (group and dist.get_process_group_ranks(group)) == expected
        finally:
            dist.destroy_process_group()


def test_adding_up_the_loss_leaves_the_factor_of_the_gradients_alone():
    loss, targets = PipelineLoss(CPU), torch.zeros(1)
    assert loss(torch.tensor(3.0), targets) == 0.0
    assert (loss.total, loss.grad_factor) == (3.0, 0.0)
    loss.grad_factor = torch.tensor(0.5)
    assert loss(torch.tensor(4.0), targets) == 2.0
    assert (loss.total, loss.grad_factor) == (7.0, 0.5)


# No subnormals: what torch 2.5.1 compiles for a CPU is linked with -ffast-math, and loading it flushes them to zero.
@given(st.integers(1, 96), st.integers(1, 16), st.floats(0, 8, allow_subnormal=False))
def test_the_heaviest_stage_is_as_light_as_can_be(n_layer, n_stages, head):
    if n_layer < max(1, n_stages - 1):
        return
    sizes = balanced(n_layer, n_stages, head)
    assert len(sizes) == n_stages
    assert sum(sizes) == n_layer
    assert all(size >= 1 for size in sizes[:-1])
    heaviest = max([*sizes[:-1], sizes[-1] + head])
    for in_last in range(n_layer - (n_stages - 1) + 1 if n_stages > 1 else 0):
        others = -(-(n_layer - in_last) // (n_stages - 1))
        assert heaviest <= max(others, in_last + head) + 1e-9


def test_stages_are_described_with_the_head_on_the_last():
    batch = SimpleNamespace(grad_accum_steps=4, micro_batch_size=2)
    run = SimpleNamespace(gpt=PRESETS["1.6b"], seq_len=1024, pp_size=4, batch=batch)
    assert describe_stages(run, options_of("1F1B")) == [
        "stages   13 | 13 | 12 | 10 + head blocks (head = 2.49 blocks; the heaviest stage has 1.03 x the mean)",
        "schedule 1F1B, 4 micro-batches of 2",
    ]


def test_what_schedules_take():
    assert [m for m in range(1, 9) if fits("1F1B", m, 4, 4)] == [4, 5, 6, 7, 8]
    assert [m for m in range(1, 11) if fits("Interleaved1F1B", m, 4, 8)] == [4, 5, 6, 7, 8, 10]
    assert [m for m in range(1, 5) if fits("GPipe", m, 4, 4)] == [1, 2, 3, 4]
    assert [m for m in range(1, 10) if fits("DualPipeV", m, 2, 4)] == [4, 5, 6, 7, 8, 9]
