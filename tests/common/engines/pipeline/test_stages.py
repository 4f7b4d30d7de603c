"""Each stage of a GPT holds its layers, all in turn compute the whole model, and two ranks share the table."""

from contextlib import contextmanager

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptscale.common.engines.pipeline.stages import Stage, stages_of, tied_embedding_group
from gptscale.common.model.gpt import GPT
from gptscale.common.settings.gpt_config import GPTConfig

CONFIG = GPTConfig(n_layer=4, n_head=2, n_embd=16, block_size=8, vocab_size=30)


@contextmanager
def fake_world(rank, nproc):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=nproc)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return GPT(CONFIG)


@pytest.mark.parametrize("sizes", [[4], [2, 2], [1, 2, 1], [2, 2, 0]])
def test_stages_in_turn_compute_the_loss_and_gradients_of_the_model(sizes, gpt):
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


def test_a_stage_holds_its_blocks_and_nothing_of_the_others(gpt):
    first, last = stages_of(gpt, [1, 1, 2], [0, 2])
    modules = [{name.rpartition(".")[0] for name, _ in stage.named_parameters()} for stage in (first, last)]
    assert {m for m in modules[0] if "blocks" not in m} == {"wte", "wpe"}
    assert {m for m in modules[1] if "blocks" not in m} == {"wte", "ln_f"}
    assert {m.split(".")[1] for m in modules[0] if "blocks" in m} == {"0"}
    assert {m.split(".")[1] for m in modules[1] if "blocks" in m} == {"2", "3"}


def test_an_inner_stage_passes_activations_on(gpt):
    inner = Stage(gpt, range(1, 3), embeds=False, ends=False)
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(inner(x), gpt.blocks[2](gpt.blocks[1](x)))


@pytest.mark.parametrize(
    ("sizes", "pipelines"),
    [
        ((4,), [[0, 1, 2, 3]]),
        # (pp, dp): ranks 0 and 1 are the first stages of two pipelines.
        ((2, 2), [[0, 2], [1, 3]]),
        ((3, 2), [[0, 2, 4], [1, 3, 5]]),
        ((1, 2), [[0], [1]]),
    ],
)
def test_the_two_ends_of_each_pipeline_share_the_table(sizes, pipelines):
    for pipeline in pipelines:
        for rank in pipeline:
            with fake_world(rank, sum(map(len, pipelines))):
                mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp")[: len(sizes)])
                group = tied_embedding_group(mesh)
                ranks = group and torch.distributed.get_process_group_ranks(group)
            is_end = len(pipeline) > 1 and rank in (pipeline[0], pipeline[-1])
            assert ranks == ([pipeline[0], pipeline[-1]] if is_end else None)
