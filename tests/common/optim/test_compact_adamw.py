"""The moments in bf16 and 8 bits: against AdamW in fp64, through checkpoints, on shards, compiled."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptscale.common.checkpoint.reader import Reader
from gptscale.common.checkpoint.writer import save
from gptscale.common.errors import ConfigError
from gptscale.common.optim import compact_adamw
from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.process.world import World
from gptscale.common.settings.optimizers import ADAMW_STATE, OPTIMIZERS
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes.single import SingleConfig, build

FORMS = ["bf16", "8bit"]
# Two of whole blocks, one with 160 elements over, one vector that is packed, and three that are small.
SHAPES = {"a": (64, 128), "b": (300, 40), "c": (52, 80), "bias": (4352,)}
SHAPES |= {"norm": (128,), "edge": (63, 65), "one": (1, 1)}
PACKED = ["a", "b", "c", "bias"]
LR, DECAY = 1e-3, 0.1


def config_of(form, **changes):
    return RunConfig(optimizer_state=form, weight_decay=DECAY, **{"clip_grad_norm": 0.0, **changes})


def parameters(shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(0.02 * torch.randn(s, generator=generator)) for n, s in shapes.items()}


def give_gradients(params, seed, scale=1e-3):
    """Rows of very unequal size, as those of a token table."""
    generator = torch.Generator().manual_seed(seed)
    for p in params.values():
        rows = torch.logspace(-3, 0, p.shape[0])[torch.randperm(p.shape[0], generator=torch.Generator().manual_seed(9))]
        p.grad = scale * torch.randn(p.shape, generator=generator) * rows.view(-1, *[1] * (p.dim() - 1))


def stored(optimizer):
    """Copies of every tensor of the optimizer's own state."""
    return {(i, k): t.clone() for i, s in enumerate(optimizer.torch.state.values()) for k, t in s.items()}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[k]) for k, t in ours.items())


def take_steps(params, optimizer, steps, scale=1e-3):
    """Step with the gradients of each number in `steps`."""
    for step in steps:
        give_gradients(params, step, scale)
        optimizer.step(LR, torch.tensor(1.0))


def reference_step(weight, grad, m, v, step, decay, betas=(0.9, 0.95)):
    """AdamW in fp64: Loshchilov & Hutter 2019, algorithm 2, as torch writes it."""
    weight, g, m, v = (t.detach().double() for t in (weight, grad, m, v))
    m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    denominator = (v / (1 - betas[1] ** step)).sqrt() + 1e-8
    return weight * (1 - LR * decay) - LR * (m / (1 - betas[0] ** step)) / denominator, m, v


@pytest.mark.parametrize("form", FORMS)
def test_each_step_is_adamws_from_the_moments_that_were_stored(form):
    """In fp64 from the same moments: weights to fp32's rounding, new moments to that of what they are stored in."""
    params = parameters()
    optimizer = FusedOptimizer(params, config_of(form))
    for step in range(1, 9):
        give_gradients(params, seed=step)
        expected = {
            n: reference_step(
                p, p.grad, *(optimizer.torch.moment(p, k) for k in ADAMW_STATE), step, DECAY * (p.dim() > 1)
            )
            for n, p in params.items()
        }
        optimizer.step(LR, torch.tensor(1.0))
        for name, p in params.items():
            weight, m, v = expected[name]
            torch.testing.assert_close(p.detach().double(), weight, rtol=3e-7, atol=3e-9)
            for key, exact, worst in (("exp_avg", m, 0.0106), ("exp_avg_sq", v, 0.0036)):
                kept = optimizer.torch.moment(p, key).double()
                # A mean may cancel to almost nothing: then only its absolute error is small.
                tiny = 1e-7 * exact.abs().max()
                if name not in PACKED:
                    torch.testing.assert_close(kept, exact, rtol=1e-6, atol=tiny)
                elif form == "bf16":
                    torch.testing.assert_close(kept, exact, rtol=2**-8, atol=tiny)
                else:
                    assert (kept - exact).abs().max() <= worst * exact.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_what_is_small_and_what_is_left_over_is_torchs_own(form):
    ours, theirs = parameters(), parameters()
    pairs = (ours, form), (theirs, "fp32")
    first, second = (FusedOptimizer(params, config_of(kept, clip_grad_norm=0.5)) for params, kept in pairs)
    take_steps(ours, first, range(5), scale=1.0)
    take_steps(theirs, second, range(5), scale=1.0)
    for name in ("norm", "edge", "one"):
        assert torch.equal(ours[name], theirs[name])
    packed = first.torch.state[ours["b"]]["exp_avg"].numel()
    assert packed == 46 * 256
    assert torch.equal(ours["b"].flatten()[packed:], theirs["b"].flatten()[packed:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_skipped_leaves_every_bit(form, steps, bad):
    params = parameters()
    optimizer = FusedOptimizer(params, config_of(form))
    take_steps(params, optimizer, range(steps))
    weights, state = {n: p.detach().clone() for n, p in params.items()}, stored(optimizer)
    # Neither the step with the bad number nor a clean one after it changes anything.
    for poison in (bad, 0.0):
        give_gradients(params, seed=7)
        params["a"].grad[3, 5] += poison
        optimizer.step(LR, torch.tensor(1.0))
        assert same({n: p.detach() for n, p in params.items()}, weights)
        assert same(stored(optimizer), state)
    assert optimizer.counters()["optimizer_steps"] == steps


def test_loss_scale_and_clip_divide_the_gradient():
    """fp16's scale of 65536 is a power of two, so the steps are the same bits as without."""
    plain, scaled = parameters(), parameters()
    first, second = (
        FusedOptimizer(p, config_of("8bit", precision=precision, clip_grad_norm=0.01))
        for p, precision in ((plain, "fp32"), (scaled, "fp16"))
    )
    take_steps(plain, first, range(3))
    take_steps(scaled, second, range(3), scale=1e-3 * 2.0**16)
    for name, p in plain.items():
        torch.testing.assert_close(p, scaled[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", ["fp32", *FORMS])
def test_bytes_are_those_of_the_formula(form):
    params = parameters({"a": (64, 128), "b": (512, 64)})
    optimizer = FusedOptimizer(params, config_of(form))
    numel = sum(p.numel() for p in params.values())
    assert optimizer.nbytes() == (4 + OPTIMIZERS["adamw"].state_bytes[form]) * numel
    take_steps(params, optimizer, range(2))
    assert optimizer.nbytes() == (4 + OPTIMIZERS["adamw"].state_bytes[form]) * numel


def test_slices_do_not_change_the_result(monkeypatch):
    results = []
    for size in (2**30, 1024, 256):
        monkeypatch.setitem(compact_adamw.SLICE, "cpu", size)
        params = parameters()
        optimizer = FusedOptimizer(params, config_of("8bit"))
        take_steps(params, optimizer, range(3))
        results.append(({n: p.detach() for n, p in params.items()}, stored(optimizer)))
    for weights, state in results[1:]:
        assert same(weights, results[0][0])
        assert same(state, results[0][1])


def engine_and_plan(tmp_path, form, **changes):
    config = RunConfig(
        n_layer=2, n_head=2, n_embd=64, seq_len=32, data="synthetic", dropout=0.1, steps=6, global_batch_size=4,
        optimizer_state=form, device="cpu", out=tmp_path, **changes,
    )  # fmt: skip
    plan = preflight("single", config, SingleConfig(), World.from_environment(config.device, config.dist_timeout_s))
    return build(plan.run, SingleConfig()), plan


def run_steps(engine, plan, start, steps):
    batches = plan.batches(plan.train, 0, 1)
    for step in range(start, steps):
        engine.train_step(batches.batch(step), plan.run.lr_at(step))


@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_was_saved_and_resumed_is_bit_identical(form, tmp_path):
    whole, plan = engine_and_plan(tmp_path, form)
    run_steps(whole, plan, 0, 3)
    before = stored(whole.optimizer)
    path = save(whole, tmp_path, 3, {"workload": {}})
    # Saving stores again what it has shown.
    assert same(stored(whole.optimizer), before)
    resumed, _ = engine_and_plan(tmp_path, form)
    Reader(path).verify().load_into(resumed)
    assert same(stored(resumed.optimizer), before)
    for engine in (whole, resumed):
        run_steps(engine, plan, 3, 6)
    assert same(stored(resumed.optimizer), stored(whole.optimizer))
    assert same({s.name: s.tensor for s in resumed.state()}, {s.name: s.tensor for s in whole.state()})
    assert {s.tensor.dtype for s in whole.state()} == {torch.float32}


def test_a_checkpoint_moves_between_forms_and_is_rounded(tmp_path):
    source, plan = engine_and_plan(tmp_path, "fp32")
    run_steps(source, plan, 0, 3)
    path = save(source, tmp_path, 3, {"workload": {}})
    exact = {s.name: s.tensor.clone() for s in source.state()}
    for form in FORMS:
        target, _ = engine_and_plan(tmp_path, form)
        Reader(path).load_into(target)
        loaded = {s.name: s.tensor.clone() for s in target.state()}
        for name, tensor in exact.items():
            if name.startswith("model/") or tensor.numel() < 4096:
                assert torch.equal(tensor, loaded[name])
            elif form == "bf16":
                torch.testing.assert_close(loaded[name], tensor, rtol=2**-8, atol=0)
            else:
                assert (loaded[name] - tensor).abs().max() <= 0.0106 * tensor.abs().max()
        # A run with fp32 moments reads the rounded ones as they are.
        back, _ = engine_and_plan(tmp_path, "fp32")
        Reader(save(target, tmp_path / form, 3, {"workload": {}})).load_into(back)
        assert same({s.name: s.tensor for s in back.state()}, loaded)


@pytest.fixture
def second_of_two():
    """A mesh of two, of which this process is rank 1, over a backend that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("form", FORMS)
def test_a_dtensor_is_stepped_and_described_by_its_shard(form, second_of_two):
    plain = {"a": nn.Parameter(parameters()["a"].detach()[32:].clone())}
    sharded = {
        "a": nn.Parameter(DTensor.from_local(plain["a"].detach().clone(), second_of_two, [Shard(0)], run_check=False))
    }
    first, second = FusedOptimizer(plain, config_of(form)), FusedOptimizer(sharded, config_of(form))
    for step in range(3):
        give_gradients(plain, seed=step)
        grad = plain["a"].grad.clone()
        sharded["a"].grad = DTensor.from_local(grad, second_of_two, [Shard(0)], run_check=False)
        first.step(LR, torch.tensor(1.0))
        second.step(LR, torch.tensor(1.0))
    assert torch.equal(sharded["a"].to_local(), plain["a"])
    assert same(stored(second), stored(first))
    for whole, box in zip(first.state(), second.state(), strict=True):
        assert (box.name, box.shape, box.offset) == (whole.name, (64, 128), (32, 0))
        assert torch.equal(box.tensor, whole.tensor)


def test_a_rank_without_a_row_has_nothing_to_do(second_of_two):
    empty = DTensor.from_local(
        torch.empty(0, 128), second_of_two, [Shard(0)], run_check=False, shape=(1, 128), stride=(128, 1)
    )
    params = {"none": nn.Parameter(empty), "a": parameters()["a"]}
    optimizer = FusedOptimizer(params, config_of("8bit"))
    for p in params.values():
        p.grad = torch.zeros_like(p)
    optimizer.step(LR, torch.tensor(1.0))
    assert next(s for s in optimizer.state() if s.name == "adamw.exp_avg/none").tensor.shape == (0, 128)


def test_compiled_it_is_one_graph_for_all_sizes_and_equal(monkeypatch):
    """The first slice has as many blocks as the code has values: a length that must not be tied to it."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(
        compact_adamw, "_compiled", lambda: torch.compile(compact_adamw.update_slice, backend=counter, fullgraph=True)
    )
    shapes = {"first": (256, 256), **SHAPES, "last": (512, 300)}
    eager, fused = parameters(shapes), parameters(shapes)
    first, second = FusedOptimizer(eager, config_of("8bit")), FusedOptimizer(fused, config_of("8bit"))
    second.torch.compiled = True
    take_steps(eager, first, range(3))
    take_steps(fused, second, range(3))
    assert counter.frame_count == 1
    # Another order of the same operations may put a moment into the next code.
    for name, p in eager.items():
        torch.testing.assert_close(p, fused[name], rtol=1e-4, atol=0.02 * LR)


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_others_have_no_state_in_8bit(optimizer):
    with pytest.raises(ConfigError, match=f"{optimizer} has no state in 8bit"):
        RunConfig(optimizer=optimizer, optimizer_state="8bit")
