import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptscale.common.errors import ConfigError
from gptscale.common.model.activation_checkpointing import apply_activation_checkpointing
from gptscale.common.model.compilation import apply_compile
from gptscale.common.model.gpt import GPT
from gptscale.common.model.hf_weights import from_hf, to_hf
from gptscale.common.model.initial_weights import init_tensor, init_weights
from gptscale.common.settings.gpt_config import PRESETS, GPTConfig
from gptscale.common.state import Shard, shard_of

SMALL = GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=301)


def random_model(gpt=SMALL, std=0.2):
    torch.manual_seed(0)
    model = GPT(gpt)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model


@pytest.fixture
def ids():
    return torch.randint(0, 301, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count(name):
    gpt = PRESETS[name]
    with torch.device("meta"):
        model = GPT(gpt)
    in_memory = sum(p.numel() for p in model.parameters())
    assert in_memory - (gpt.padded_vocab_size - gpt.vocab_size) * gpt.n_embd == gpt.n_params


def test_the_contractual_shape():
    gpt = PRESETS["1.6b"]
    assert (gpt.n_embd, gpt.n_head, gpt.n_layer, gpt.block_size, gpt.vocab_size) == (1600, 32, 48, 1024, 50257)
    assert (gpt.n_params, gpt.n_matmul_params, gpt.head_dim) == (1_557_611_200, 1_554_971_200, 50)
    assert gpt.padded_vocab_size == 50304
    assert gpt.lr == 5e-4


def test_matmul_parameters_against_torch_flop_counter(ids):
    """2 operations per matmul parameter and token forward; the counter also sees attention, taken away by its formula."""
    model = random_model(GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=384))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused CPU kernel is not in the counter's table
        model(ids[:, :32])
    attention = 4 * 3 * 64 * 32 * 32 * 2  # 2 products x 2 operations x L h T per token, full square, 64 tokens
    assert counter.get_total_flops() - attention == 2 * model.config.n_matmul_params * 64


def test_loss_is_cross_entropy_of_the_logits(ids):
    model = random_model()
    inputs, targets = ids[:, :-1], ids[:, 1:]
    logits = model(inputs)
    assert logits.shape == (2, 32, 301)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(inputs, targets), expected, rtol=1e-5, atol=1e-4)


def test_attention_is_causal(ids):
    model = random_model().eval()
    other = ids[:, :-1].clone()
    other[:, 20:] = 7
    torch.testing.assert_close(model(ids[:, :-1])[:, :20], model(other)[:, :20])


def test_weights_are_a_function_of_name_and_seed_whatever_the_cut():
    whole = init_tensor("blocks.1.attn.qkv.weight", (192, 64), SMALL, seed=5)
    part = torch.empty(10, 64)
    init_weights([Shard("model/blocks.1.attn.qkv.weight", part, (192, 64), (100, 0))], SMALL, seed=5)
    assert torch.equal(part, whole[100:110])
    assert not torch.equal(whole, init_tensor("blocks.0.attn.qkv.weight", (192, 64), SMALL, seed=5))
    assert not torch.equal(whole, init_tensor("blocks.1.attn.qkv.weight", (192, 64), SMALL, seed=6))


def test_initial_loss_is_that_of_chance_and_padding_rows_are_zero(ids):
    model = GPT(SMALL)
    init_weights((shard_of(f"model/{n}", p) for n, p in model.named_parameters()), SMALL, seed=1)
    assert torch.equal(model.wte.weight[301:], torch.zeros(384 - 301, 64))
    loss = model(ids[:, :-1], ids[:, 1:]) / 64
    assert abs(loss.item() - torch.log(torch.tensor(301.0)).item()) < 0.1


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_no_bit(ids, mode):
    plain, checkpointed = random_model(), random_model()
    apply_activation_checkpointing(checkpointed.blocks, mode)
    losses = []
    for model in (plain, checkpointed):
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    assert list(dict(plain.named_parameters())) == list(dict(checkpointed.named_parameters()))
    for p, q in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def recomputed_flops(mode, ids):
    model = random_model()
    apply_activation_checkpointing(model.blocks, mode)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(ids[:, :-1], ids[:, 1:]).backward()
    return counter.get_total_flops()


def test_full_recomputes_every_block_and_selective_no_product(ids):
    none, selective, full = (recomputed_flops(m, ids) for m in ("none", "selective", "full"))
    assert selective == none
    # 8 h^2 of a block's 12: recomputation ends before the last product, whose output backward does not need
    assert full - none == 2 * 8 * 3 * 64**2 * 64 + 4 * 3 * 64 * 32 * 32 * 2


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf", "gelu_sigmoid"])
def test_transformers_gpt2_has_equal_logits_both_ways(ids, activation):
    pytest.importorskip("transformers")
    import dataclasses

    model = random_model(dataclasses.replace(SMALL, activation=activation)).eval()
    hf = to_hf(model).eval()
    with torch.no_grad():
        ours, theirs = model(ids[:, :-1]), hf(ids[:, :-1]).logits
        back = from_hf(hf).eval()(ids[:, :-1])
    assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, theirs.abs().max())
    assert torch.equal(ours, back)


@pytest.mark.parametrize("variant", ["tanh", "erf", "sigmoid"])
def test_our_operators_in_the_gpt_compute_what_torchs_do(ids, variant):
    import dataclasses

    found = []
    for activation in (f"gelu_{variant}", f"custom-{variant}"):
        model = random_model(dataclasses.replace(SMALL, activation=activation))
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        found.append((loss.item(), norm.item()))
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_from_hf_starts_from_transformers_own_random_weights(ids):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=48, vocab_size=301)
    hf = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        assert (from_hf(hf).eval()(ids) - hf(ids).logits).abs().max() <= 1e-5


def test_from_hf_refuses_what_it_would_get_wrong():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, n_inner=64, vocab_size=301)
    with pytest.raises(ValueError, match="n_inner 64"):
        from_hf(transformers.GPT2LMHeadModel(config))


def test_head_dim_must_be_whole():
    with pytest.raises(ConfigError, match=r"n_embd 64 is not divisible by n_head 5, .*use n_head 4"):
        GPTConfig(n_layer=1, n_head=5, n_embd=64)


@pytest.mark.timeout(300)
def test_compile_makes_one_graph_for_all_blocks_and_the_same_numbers(ids):
    """Three blocks of one shape are compiled once; forward and backward agree with eager to rounding."""
    plain, compiled = random_model(), random_model()
    apply_compile(compiled.blocks)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses = []
    for model in (plain, compiled):
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5 * float(p.grad.abs().max()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
