"""The planner: what it lists is what recipes accept, and known orderings hold, with trials that are told."""

import shlex

import pytest
from told_trials import tried

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.plan.enumeration import enumerate_runs, valid_run
from gptscale.foresight.plan.planner import plan
from gptscale.foresight.plan.question import gpu_cluster
from gptscale.foresight.plan.report import headline
from gptscale.foresight.plan.rows import PlannedRow, places_of, words_of
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import check_without_device

OURS = "single,ddp,fsdp,fsdp_offload,zero1,zero2,zero3,zero_offload,zero_infinity,tensor_parallel,pipeline,hybrid_3d"


def listed(model, recipes, batch=32, nodes=1):
    """Return the runs that are listed for eight devices, the recipes that are left out, and the devices."""
    config = RunConfig(model=model, global_batch_size=batch, precision="bf16", device="cuda")
    cluster = gpu_cluster("h100-80", nodes, 8 // nodes, None)
    return *enumerate_runs(config, cluster, recipes.split(",")), cluster


def planned(model, recipes, nodes=1, per_node=8, device="h100-80", batch=64, link=None, trial=tried, rows=20):
    """Return a plan, with trials as `trial` tells them."""
    cluster = gpu_cluster(device, nodes, per_node, link)
    config = RunConfig(model=model, global_batch_size=batch, precision="bf16", device="cuda")
    return plan(config, cluster, recipes.split(","), trial, wanted=rows)


@pytest.mark.slow
def test_every_listed_run_is_what_its_command_makes_and_preflight_accepts():
    groups, left_out, cluster = listed("gpt2", OURS, nodes=2)
    assert set(left_out) == {"single", "tensor_parallel"}
    groups = [groups[0], *groups[::37], groups[-1]]
    assert {group[0][0].recipe for group in groups} >= {"ddp", "hybrid_3d"}
    for asked, config in (candidate for group in groups for candidate in group):
        parsed, own = parse_run(asked.recipe, words_of(plan_row(asked, config, cluster)))
        run = valid_run(asked.recipe, parsed, own, cluster)
        check_without_device(run, own)
        assert (run.batch, run.tp_size, run.pp_size) == (asked.batch, asked.tp_size, asked.pp_size)
        assert own == config


def plan_row(run, config, cluster):
    return PlannedRow(run, config, cluster, places_of(run, config), 1.0)


def test_tensor_ranks_divide_heads():
    groups, left_out, _ = listed("gpt2-xl", "tensor_parallel,hybrid_3d")
    assert "25" in left_out["tensor_parallel"]
    assert {group[0][0].tp_size for group in groups} == {1}


def test_sequences_are_cut_in_rings_where_heads_are_not_divisible():
    groups, _, cluster = listed("gpt2-xl", "context_parallel", batch=8)
    runs = [group[0] for group in groups]
    assert {(run.cp_size, run.batch.dp_size, own.cp_style) for run, own in runs} == {
        (size, 8 // size, "ring") for size in (2, 4, 8)
    }
    words = words_of(plan_row(*runs[0], cluster))
    assert words[words.index("--cp-size") + 1] == str(runs[0][0].cp_size)


def test_replicas_of_13b_do_not_fit_a_device_and_shards_do():
    found = planned("gpt3-13b", "ddp,zero1,fsdp,tensor_parallel", device="a100-80")
    fitting = {row.run.recipe for row in found.rows}
    assert "ddp" not in fitting
    assert fitting >= {"fsdp", "tensor_parallel"}
    assert found.recommended.run.recipe == "fsdp"


def test_a_small_model_on_a_fast_node_needs_no_tensor_ranks():
    found = planned("1.6b", "ddp,fsdp,tensor_parallel,pipeline", batch=128)
    assert found.recommended.run.recipe in ("ddp", "fsdp")
    speeds = {row.run.recipe: row.tokens_per_s for row in found.rows}
    # Or it was not even worth a trial.
    assert speeds.get("tensor_parallel", 0.0) < speeds["ddp"]


def test_slow_links_between_nodes_turn_the_order_round():
    """FSDP over Ethernet gathers weights through it for each micro-batch. Stages send activations only."""
    fast = planned("gpt3-2.7b", "fsdp,pipeline", nodes=4, per_node=2, batch=64)
    slow = planned("gpt3-2.7b", "fsdp,pipeline", nodes=4, per_node=2, batch=64, link="ethernet-10")
    assert fast.recommended.run.recipe == "fsdp"
    assert slow.recommended.run.recipe == "pipeline"


def test_offloaded_state_is_on_the_host_and_its_disk_makes_a_step_longer():
    found = planned("gpt2-xl", "single,zero_offload,zero_infinity", per_node=1, device="24gb", batch=8)
    rows = {row.run.recipe: row for row in found.rows}
    assert "single" not in rows
    assert rows["zero_offload"].places.host > 12 * 1.5e9
    # By its estimate its step lasts so much longer that it is not worth a trial.
    assert "zero_infinity" not in rows
    alone = planned("gpt2-xl", "zero_infinity", per_node=1, device="24gb", batch=8)
    assert alone.recommended.places.disk > 16 * 1.5e9


def test_a_recipe_of_another_library_shares_its_strategys_row():
    found = planned("1.6b", "fsdp,accelerate_fsdp")
    (row,) = found.rows
    assert found.also[row.split] == ["accelerate_fsdp"]


def test_the_recommendation_is_a_command_and_two_reasons():
    found = planned("1.6b", "ddp,fsdp,zero1,zero2", nodes=2, batch=128)
    first, command, *why = headline(found)
    assert first.startswith("recommended")
    assert shlex.split(command)[:2] == ["gptscale", "submit"]
    assert len(why) == 2
    assert all(sentence.strip().startswith("Not ") for sentence in why)


def test_of_rows_that_are_as_good_the_simplest_recipe_is_taken():
    seconds = {"ddp": 1.04, "fsdp": 1.0, "zero1": 1.2}
    found = planned("gpt2", ",".join(seconds), trial=lambda row: tried(row, seconds=seconds[row.run.recipe]))
    assert [row.run.recipe for row in found.rows] == ["fsdp", "ddp", "zero1"]
    assert found.recommended.run.recipe == "ddp"


def test_a_row_that_does_not_fit_after_all_gives_way_to_its_next_form():
    asked = []

    def trial(row):
        asked.append(row)
        return tried(row, nbytes=2**40 if len(asked) == 1 else None)

    (row,) = planned("gpt2", "ddp", trial=trial).rows
    assert [each.split for each in asked] == [row.split] * 2
    assert asked[0].detail != row.detail


def test_a_trial_that_fails_is_told_and_another_row_is_tried():
    def trial(row):
        if row.run.recipe == "fsdp":
            raise ConfigError("no C compiler", "for the mock of CUDA", "apt-get install gcc")
        return tried(row)

    found = planned("gpt2", "fsdp,ddp", trial=trial, rows=2)
    assert {row.run.recipe for row in found.rows} == {"ddp"}
    assert "no C compiler, for the mock of CUDA" in next(why for name, why in found.left_out.items() if "fsdp" in name)


def test_only_so_many_rows_are_tried_as_are_wanted():
    found = planned("gpt2", "ddp,fsdp,zero1,zero2,zero3", rows=2)
    assert len(found.rows) == 2
    assert found.splits > 2


def test_one_device_holds_what_single_holds_and_under_ddp_buckets_too():
    """DDP has buckets with one rank too, as torch's allocator showed under the mock."""
    rows = planned("gpt2", "single,ddp", per_node=1, batch=8).rows
    bytes_of = {row.run.recipe: row.places.on_device for row in rows}
    assert {row.run.batch.micro_batch_size for row in rows} == {8}
    buckets = 4 * rows[0].run.gpt.n_params_in_memory
    assert bytes_of["ddp"] == bytes_of["single"] + buckets
