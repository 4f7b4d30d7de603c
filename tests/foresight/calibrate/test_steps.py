"""The step of a recipe on this machine, and layers told apart from models of two depths."""

import pytest
import torch

from benchmarks.foresight.times.shapes import plan_of
from gptscale.common.process.world import World
from gptscale.foresight.calibrate.layers import PHASES, _apart, run_of
from gptscale.foresight.calibrate.steps import block_parameters, is_written, step_here
from gptscale.foresight.calibrate.timing import Timing
from gptscale.foresight.time.operations import KINDS, kind_of
from gptscale.recipes import get

SHAPE = {"n_embd": 256, "n_head": 4, "n_layer": 4, "seq_len": 64}


@pytest.fixture
def step(tmp_path):
    def make(recipe, ranks=2, **shape):
        world = World(0, 0, ranks, torch.device("cpu"), 60.0)
        plan = plan_of(recipe, SHAPE | shape, 1, tmp_path, world)
        return step_here(plan.run, plan.recipe_config), plan.run

    return make


def done(step, rank=0):
    """Return how often each kind is done on a rank."""
    total = {}
    for item in step.items:
        for operation, n in step.works[item.work].items() if item.rank == rank else ():
            total[operation.kind] = total.get(operation.kind, 0) + n
    return total


def test_a_step_has_every_layer_once_each_way(step):
    work = done(step("single", 1)[0])
    ways = ("block forward", "block backward"), ("host", "head forward", "head backward", "optimizer")
    assert work == dict.fromkeys(ways[0], 4) | dict.fromkeys(ways[1], 1)
    work = done(step("fsdp")[0])
    assert work["fsdp: block forward"] == work["fsdp: block backward"] == work["fsdp: block optimizer"] == 4
    assert "optimizer" not in work


def test_gradients_of_earlier_micro_batches_wait(step):
    work = done(step("zero2", micro_batch_size=1)[0])
    assert [work[f"zero2: block {way}"] for way in ("forward", "accumulation", "backward")] == [16, 12, 4]
    assert (work["zero2: head accumulation"], work["zero2: head backward"]) == (3, 1)
    plain = done(step("single", 1, micro_batch_size=1)[0])
    assert plain["block backward"] == 4 * 8
    assert "block accumulation" not in plain


def test_stages_of_a_pipeline_have_their_own_blocks_and_optimizers(step):
    work, run = step("pipeline")
    first, last = done(work, 0), done(work, 1)
    micro_batches = run.batch.grad_accum_steps
    assert (first["block forward"] + last["block forward"]) == 4 * micro_batches
    assert "head forward" not in first
    assert last["head forward"] == micro_batches
    assert first["stage"] == last["stage"] == 2 * micro_batches
    assert first["send"] == last["send"] == micro_batches
    sizes = [op.shape[0] for item in work.items for op in work.works[item.work] if op.kind == "optimizer"]
    # The table lies on both ends.
    assert sum(sizes) == 4 * block_parameters(run.gpt) + 2 * run.gpt.padded_vocab_size * run.gpt.n_embd


def test_layers_are_those_of_a_recipes_own_defaults(step):
    _, run = step("lightning_fabric")
    config = get("lightning_fabric").load().LightningFabricConfig
    assert is_written(run, config())
    assert not is_written(run, config(strategy="fully_shard"))
    for recipe in ("fsdp", "zero_infinity", "tensor_parallel"):
        row = get(recipe)
        assert is_written(step(recipe)[1], getattr(row.load(), row.config)(**row.preset))


@pytest.mark.parametrize("recipe", ["ddp", "fsdp", "tensor_parallel", "pipeline", "hybrid_3d"])
def test_every_operation_has_a_curve(step, recipe):
    assert all(kind_of(operation) in KINDS for operation in step(recipe)[0].operations())


def test_a_probe_is_the_run_that_the_command_line_would_make(step):
    for recipe in ("ddp", "tensor_parallel", "hybrid_3d"):
        _, run = step(recipe)
        config = run.config.__class__(model="tiny", micro_batch_size=run.batch.micro_batch_size, n_layer=1)
        probe = run_of(recipe, config, run.world)
        assert (probe.tp_size, probe.pp_size, probe.batch.dp_size) == (run.tp_size, run.pp_size, run.batch.dp_size)


def test_a_block_is_half_of_what_three_take_longer_than_one():
    times = _apart({depth: {phase: Timing(2 + 5 * depth, 0.01, 9) for phase in PHASES} for depth in (1, 3)})
    assert all(times.block[phase].seconds == pytest.approx(5) for phase in PHASES)
    assert all(times.rest[phase].seconds == pytest.approx(2) for phase in PHASES)
    assert times.rest["forward"].spread > times.block["forward"].spread
    # Noise makes no negative time, and says that it is one.
    noisy = _apart({depth: {phase: Timing(3 - 0.1 * depth, 0.2, 9) for phase in PHASES} for depth in (1, 3)})
    assert noisy.block["forward"].seconds > 0
    assert noisy.block["forward"].spread > 1


def test_tensor_ranks_have_the_shapes_of_the_recipe():
    from gptscale.common.settings.gpt_config import TINY
    from gptscale.foresight.calibrate.cut import cut_gpt

    model = cut_gpt(TINY, 2, torch.device("cpu"))
    matrices = [p.numel() for name, p in model.blocks[0].named_parameters() if p.ndim == 2]
    assert sum(matrices) == 12 * TINY.n_embd**2 // 2
    ids = torch.randint(0, TINY.vocab_size, (2, 16))
    model(ids, ids).backward()
    assert all(p.grad is not None for p in model.parameters())
