"""Where the ranks' shares of a weight lie: their boxes make the whole tensor, each element once."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from gptscale.common.engines.colossal.checks import bubble_fraction, default_micro_batches, stage_sizes
from gptscale.common.engines.colossal.weights import FlatLayout, TensorLayout, cut_dim
from gptscale.common.engines.rank_shapes import stage_of
from gptscale.common.model.hf_gpt2 import to_hf
from gptscale.common.process import environments
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.mesh import Mesh
from gptscale.recipes.colossal_hybrid import ColossalPipelineConfig

GPT = GPTConfig(n_layer=1, n_head=4, n_embd=12, block_size=6, vocab_size=5)
SHAPES = {
    "wte.weight": (128, 12),
    "wpe.weight": (6, 12),
    "blocks.0.ln_1.weight": (12,),
    "blocks.0.attn.qkv.weight": (36, 12),
    "blocks.0.attn.qkv.bias": (36,),
    "blocks.0.attn.proj.weight": (12, 12),
    "blocks.0.mlp.fc.weight": (48, 12),
    "blocks.0.mlp.proj.weight": (12, 48),
}


def as_in_transformers(name, value):
    """Our tensor as transformers lays it out."""
    return to_hf(value, GPT.weight(name), GPT).contiguous()


def put_together(shards, shape):
    full = torch.full(shape, torch.nan)
    for shard in shards:
        assert shard.shape == shape
        assert shard.tensor.shape == full[shard.box].shape
        # No element is there twice.
        assert full[shard.box].isnan().all()
        full[shard.box] = shard.tensor
    return full


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensor_ranks_boxes_make_the_whole(name, size):
    value = torch.arange(torch.Size(SHAPES[name]).numel(), dtype=torch.float32).view(SHAPES[name])
    hf_tensor, shards = as_in_transformers(name, value), []
    for rank in range(size):
        local, dim = hf_tensor, cut_dim(name, GPT)
        # Colossal-AI cuts it like this, in split_fused_qkv_in_gpt2_style.
        if "qkv" in name:
            local = torch.cat([part.chunk(size, -1)[rank] for part in hf_tensor.chunk(3, -1)], -1)
        elif dim is not None:
            local = hf_tensor.chunk(size, dim if name == "wte.weight" else 1 - dim)[rank]
        layout = TensorLayout(GPT, rank, size)
        shards += layout.boxes(f"model/{name}", local) if rank == 0 or dim is not None else []
    assert torch.equal(put_together(shards, SHAPES[name]), value)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_flat_ranges_boxes_make_the_whole(name, size):
    """As LowLevelZero cuts: flattened, padded to a multiple of the ranks, in equal pieces wherever they fall."""
    value = torch.arange(torch.Size(SHAPES[name]).numel(), dtype=torch.float32).view(SHAPES[name])
    hf_tensor = as_in_transformers(name, value)
    padded = torch.nn.functional.pad(hf_tensor.flatten(), (0, -hf_tensor.numel() % size))
    shards = []
    for rank, flat in enumerate(padded.chunk(size)):
        layout = FlatLayout(GPT, {name: (tuple(hf_tensor.shape), rank * flat.numel())})
        shards += layout.boxes(f"model/{name}", flat)
    assert torch.equal(put_together(shards, SHAPES[name]), value)


def test_arithmetic_of_a_pipeline():
    assert bubble_fraction(4, 1, 8) == 3 / 11
    assert bubble_fraction(2, 2, 4) == 1 / 9
    assert default_micro_batches("1f1b", 2, 8) == 4
    assert default_micro_batches("interleaved", 2, 6) == 2
    assert default_micro_batches("1f1b", 1, 8) is None


SHARES = {(36, 8, 1): [4, 4, 5, 5, 5, 5, 4, 4], (50, 8, 1): [6, 6, 6, 7, 7, 6, 6, 6]}
SHARES |= {(51, 4, 1): [12, 13, 13, 13], (48, 8, 1): [6] * 8, (10, 2, 2): [2, 3, 3, 2]}


@pytest.mark.parametrize("split", SHARES)
def test_blocks_that_are_over_go_to_the_middle(split):
    n_layer, stages, chunks = split
    assert stage_sizes(*split) == SHARES[split]
    config = ColossalPipelineConfig(schedule="interleaved" if chunks > 1 else "1f1b", num_model_chunks=max(chunks, 2))
    run = SimpleNamespace(gpt=SimpleNamespace(n_layer=n_layer), pp_size=stages, mesh=Mesh({"pp": stages}))
    for rank in range(stages):
        run.world = SimpleNamespace(rank=rank)
        assert stage_of(run, config)[2] == sum(SHARES[split][rank::stages])


LIBRARY = """
import sys
from types import SimpleNamespace
import torch._inductor.config
import gptscale.common.engines.colossal.library
assert "colossalai.booster" in sys.modules
# Each further one would be a process of torch 2.5, in every rank.
assert torch._inductor.config.compile_threads == 1
from colossalai.pipeline.stage_manager import PipelineStageManager
from gptscale.common.engines.colossal.checks import stage_sizes

splits = [(n, p, v) for n in range(1, 60) for p in range(1, 9) for v in range(1, 5) if n >= p * v]
for n, p, v in splits:
    manager = SimpleNamespace(num_layers_per_stage=None, num_stages=p, num_model_chunks=v)
    assert PipelineStageManager.distribute_layers(manager, n) == stage_sizes(n, p, v), (n, p, v)
"""


@pytest.mark.skipif(not environments.installed("colossalai", "colossalai"), reason="needs Colossal-AI's environment")
def test_the_library_shares_blocks_alike_and_starts_no_compilers():
    subprocess.run([environments.python("colossalai"), "-c", LIBRARY], check=True, timeout=300)
