"""The planner: what it lists is what recipes accept, and known orderings hold."""

import shlex

import pytest

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.calibrate.file import CalibratedMachine, MeasuredMachine, TimedOperation, add
from gptscale.foresight.plan.command_lines import command_of, words_of
from gptscale.foresight.plan.enumeration import enumerate_runs
from gptscale.foresight.plan.planner import plan, with_limits
from gptscale.foresight.plan.question import cpu_cluster, gpu_cluster
from gptscale.foresight.plan.report import headline, merged, nothing_fits
from gptscale.foresight.plan.rows import PlannedRow, places_of
from gptscale.foresight.plan.steps import steps_of
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import check_without_device

OURS = "single,ddp,fsdp,fsdp_offload,zero1,zero2,zero3,zero_offload,zero_infinity,tensor_parallel,pipeline,hybrid_3d"


@pytest.mark.slow
def test_every_listed_run_is_what_its_command_makes_and_preflight_accepts(resolver):
    cluster = gpu_cluster("h100-80", 2, 4, None)
    config = RunConfig(model="gpt2", global_batch_size=32, precision="bf16", device="cuda")
    listed = enumerate_runs(config, cluster, OURS.split(","), resolver(8))
    assert set(listed.left_out) == {"single", "tensor_parallel"}
    groups = [listed.groups[0], *listed.groups[::37], listed.groups[-1]]
    assert {group[0].run.recipe for group in groups} >= {"ddp", "hybrid_3d"}
    for candidate in (candidate for group in groups for candidate in group):
        row = plan_row(candidate, cluster)
        parsed, own = parse_run(candidate.run.recipe, words_of(row))
        run = resolver(8)(candidate.run.recipe, parsed, own)
        check_without_device(run, own)
        assert (run.batch, run.tp_size, run.pp_size) == (
            candidate.run.batch,
            candidate.run.tp_size,
            candidate.run.pp_size,
        )
        assert own == candidate.config


def plan_row(candidate, cluster):
    return PlannedRow(candidate, cluster, places_of(candidate))


def test_tensor_ranks_divide_the_heads(resolver):
    cluster = gpu_cluster("h100-80", 1, 8, None)
    config = RunConfig(model="gpt2-xl", global_batch_size=32, precision="bf16", device="cuda")
    listed = enumerate_runs(config, cluster, ["tensor_parallel", "hybrid_3d"], resolver(8))
    assert "25" in listed.left_out["tensor_parallel"]
    assert {group[0].run.tp_size for group in listed.groups} == {1}


def test_replicas_of_13b_do_not_fit_a_device_and_shards_do(planned):
    found = planned("gpt3-13b", "ddp,zero1,fsdp,tensor_parallel")
    fitting = {row.candidate.run.recipe for row in found.rows}
    assert "ddp" not in fitting
    assert fitting >= {"fsdp", "tensor_parallel"}
    assert found.recommended.candidate.run.recipe == "fsdp"


def test_a_small_model_on_a_fast_node_needs_no_tensor_ranks(planned):
    found = planned("1.6b", "ddp,fsdp,tensor_parallel,pipeline", batch=128)
    speeds = {row.candidate.run.recipe: row.tokens_per_s for row in found.best}
    assert found.recommended.candidate.run.recipe in ("ddp", "fsdp")
    assert speeds["tensor_parallel"] < speeds["ddp"]
    assert with_limits(found.best[0], found.costs).timing.bound_by == "compute"


def test_slow_links_between_nodes_turn_the_order_round(planned):
    """FSDP over Ethernet gathers weights through it for each micro-batch. Stages send activations only."""
    fast = planned("gpt3-2.7b", "fsdp,pipeline", nodes=4, per_node=2, batch=64)
    slow = planned("gpt3-2.7b", "fsdp,pipeline", nodes=4, per_node=2, batch=64, link="ethernet-10")
    assert fast.recommended.candidate.run.recipe == "fsdp"
    assert slow.recommended.candidate.run.recipe == "pipeline"
    fsdp = next(row for row in slow.best if row.candidate.run.recipe == "fsdp")
    assert with_limits(fsdp, slow.costs).timing.bound_by == "links"


def test_nothing_that_fits_names_the_nearest_and_what_it_lacks(planned):
    found = planned("gpt3-175b", "ddp,fsdp", batch=8)
    assert found.rows == []
    error = nothing_fits(found)
    assert "fsdp" in error.what
    assert "lacks" in error.what


def test_offloaded_state_is_on_the_host_and_its_bus_is_in_the_step(planned):
    found = planned("gpt2-xl", "single,zero_offload,zero_infinity", per_node=1, device="24gb", batch=8)
    rows = {row.candidate.run.recipe: with_limits(row, found.costs) for row in found.best}
    assert "single" not in rows
    assert rows["zero_offload"].places.host > 12 * 1.5e9
    assert rows["zero_infinity"].places.disk > 16 * 1.5e9
    assert rows["zero_infinity"].timing.bound_by == "disk"
    assert rows["zero_offload"].tokens_per_s > rows["zero_infinity"].tokens_per_s


def test_a_recipe_of_another_library_shares_its_strategys_row(planned):
    rows, also = merged(planned("1.6b", "fsdp,accelerate_fsdp,lightning_fabric").best)
    assert also[[row.candidate.run.recipe for row in rows].index("fsdp")] == ["accelerate_fsdp", "lightning_fabric"]


def test_the_recommendation_is_a_command_and_two_reasons(planned):
    found = planned("1.6b", "ddp,fsdp,zero1,pipeline", nodes=2, batch=128)
    first, command, *why = headline(found, command_of(found.recommended))
    assert first.startswith("recommended")
    assert shlex.split(command)[:2] == ["gptscale", "submit"]
    assert len(why) == 2
    assert all(sentence.strip().startswith("Not ") for sentence in why)


def test_figures_of_data_sheets_have_a_wide_interval_and_say_so(planned):
    timing = planned("1.6b", "ddp").recommended.timing
    low, high = timing.interval
    assert timing.grade == "data sheet"
    assert high / low > 1.5


MACHINE = CalibratedMachine("a processor", "2.11", 1, 2)


def calibration(path, cluster, resolver, models=("tiny",)):
    """Write a calibration of all operations of these models' steps."""
    timed = {}
    for model in models:
        config = RunConfig(model=model, global_batch_size=8, device="cpu")
        for group in enumerate_runs(config, cluster, ["ddp", "fsdp"], resolver(2, "cpu")).groups:
            for step in steps_of(group[0], cluster.machines("fp32"))[0]:
                timed |= {op: TimedOperation(op, "fp32", 1e-3, 0.02, 5) for op in step.operations()}
    add(path, MeasuredMachine(MACHINE, list(timed.values())))


def here(path, resolver, **more):
    cluster = cpu_cluster(2, 8 * 2**30)
    config = RunConfig(**{"model": "tiny", "global_batch_size": 8, "device": "cpu"} | more)
    return plan(config, cluster, ["ddp", "fsdp"], resolver(2, "cpu"), file=path, machine=MACHINE)


def test_a_machine_that_was_not_measured_is_not_planned_for(tmp_path, resolver):
    with pytest.raises(ConfigError, match="was not measured"):
        here(tmp_path / "none.json", resolver)


def test_what_was_calibrated_has_a_time_and_what_is_far_from_it_has_none(tmp_path, resolver):
    path = tmp_path / "calibration.json"
    calibration(path, cpu_cluster(2, 8 * 2**30), resolver)
    known = here(path, resolver)
    assert known.recommended.timing.grade == "calibrated here"
    assert known.recommended.mfu is None
    unknown = here(path, resolver, model="gpt2", seq_len=1024)
    assert unknown.recommended is None
    assert all("not calibrated" in row.timing.refused for row in unknown.rows)


def test_one_device_holds_what_single_holds_and_under_ddp_buckets_too(planned):
    """DDP has buckets with one rank too, as torch's allocator showed under the mock."""
    rows = [row.candidate for row in planned("gpt2", "single,ddp,lightning_fabric", per_node=1, batch=8).rows]
    bytes_of = {
        candidate.run.recipe: places_of(candidate).on_device
        for candidate in rows
        if candidate.run.batch.micro_batch_size == 8 and getattr(candidate.config, "strategy", "ddp") == "ddp"
    }
    buckets = 4 * rows[0].run.gpt.n_params_in_memory
    assert bytes_of["ddp"] == bytes_of["lightning_fabric"] == bytes_of["single"] + buckets
