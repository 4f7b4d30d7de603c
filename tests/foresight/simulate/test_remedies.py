"""Remedies against too little memory: the cheapest first, none that changes nothing, and the global batch stays."""

from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.simulate.remedies import remedies
from gptscale.launchers.run.options import default_recipe_config


def words(recipe, nproc, **options):
    config = RunConfig(device="cuda", global_batch_size=32, **options)
    found = list(remedies(recipe, config, default_recipe_config(recipe), nproc))
    assert all(other.global_batch_size == 32 for _, _, other, _ in found)
    return [text for text, *_ in found]


SMALLEST = "--activation-checkpointing full --micro-batch-size 1"


def test_recomputing_comes_before_another_strategy():
    assert words("ddp", 8, micro_batch_size=4) == [
        "--activation-checkpointing full",
        "--micro-batch-size 1",
        SMALLEST,
        f"recipe fsdp {SMALLEST}",
        f"recipe zero_offload {SMALLEST}",
    ]


def test_what_is_done_already_is_not_offered():
    assert words("fsdp", 8, micro_batch_size=1, activation_checkpointing="full") == [f"recipe zero_offload {SMALLEST}"]


def test_one_process_has_nothing_to_split():
    assert f"recipe fsdp {SMALLEST}" not in words("single", 1, micro_batch_size=4)


def test_a_strategy_without_data_ranks_is_not_exchanged():
    assert words("tensor_parallel", 8, micro_batch_size=1, activation_checkpointing="full") == []
