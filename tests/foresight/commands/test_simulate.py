"""`gptscale simulate`: which ranks its options name, and what it advises."""

import pytest

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.commands.simulate import SimulateOptions, ranks_of, remedies
from gptscale.launchers.run.options import default_recipe_config


@pytest.mark.parametrize(
    ("recipe", "sizes", "rank", "expected"),
    [
        ("ddp", {}, "0", [0]),
        ("ddp", {}, "last", [7]),
        ("ddp", {}, "1, 5", [1, 5]),
        # All eight ranks are stages where the option leaves the number out.
        ("pipeline", {}, "stages", [0, 1, 2, 3, 4, 5, 6, 7]),
        # (pp, dp, tp) = (2, 2, 2): the first four ranks are the first stage.
        ("hybrid_3d", {"pp_size": 2, "tp_size": 2}, "stages", [0, 4]),
        # Without a size of its own, hybrid_3d has one stage.
        ("hybrid_3d", {"tp_size": 2}, "stages", [0]),
        # (dp, pp, tp) = (2, 2, 2) is Colossal-AI's order.
        ("colossal_pipeline", {"pp_size": 2, "tp_size": 2}, "stages", [0, 2]),
    ],
)
def test_ranks_are_named_by_number_or_by_place(recipe, sizes, rank, expected):
    assert ranks_of(recipe, RunConfig(**sizes), SimulateOptions(nproc=8, rank=rank)) == expected


@pytest.mark.parametrize("rank", ["8", "-1", "", "0,,1", "first", "1.0", "stages"])
def test_a_rank_that_the_world_does_not_have_is_refused(rank):
    message = "fsdp has no pipeline stages" if rank == "stages" else "use numbers from 0 to 7, last, or stages"
    with pytest.raises(ConfigError, match=message):
        ranks_of("fsdp", RunConfig(), SimulateOptions(nproc=8, rank=rank))


SMALLEST = "--activation-checkpointing full --micro-batch-size 1"
LESS = ["--activation-checkpointing full", "--micro-batch-size 1", SMALLEST]
DONE = {"micro_batch_size": 1, "activation_checkpointing": "full"}


@pytest.mark.parametrize(
    ("recipe", "nproc", "options", "expected"),
    [
        # Recomputing comes before another strategy.
        ("ddp", 8, {"micro_batch_size": 4}, [*LESS, f"recipe fsdp {SMALLEST}", f"recipe zero_offload {SMALLEST}"]),
        # Nothing is offered that is done already.
        ("fsdp", 8, DONE, [f"recipe zero_offload {SMALLEST}"]),
        # One process has nothing to split, and a strategy without data ranks is not exchanged.
        ("single", 1, {"micro_batch_size": 4}, [*LESS, f"recipe zero_offload {SMALLEST}"]),
        ("tensor_parallel", 8, DONE, []),
    ],
)
def test_what_may_need_less_keeps_the_global_batch(recipe, nproc, options, expected):
    config = RunConfig(device="cuda", global_batch_size=32, **options)
    found = list(remedies(recipe, config, default_recipe_config(recipe), nproc))
    assert [text for text, *_ in found] == expected
    assert all(other.global_batch_size == 32 for _, _, other, _ in found)
