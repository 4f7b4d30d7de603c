"""Every byte of a step, against counts by hand, by torch's profiler, and by a world of processes."""

import gc
import json

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from worlds import ENVIRONMENT

from gptscale.common.process.program import Program
from gptscale.common.process.ranks import launch
from gptscale.common.process.world import World
from gptscale.foresight.memory.counter import Counter
from gptscale.foresight.memory.fake_world import fake_world
from gptscale.foresight.memory.owners import plain_name
from gptscale.foresight.memory.trace import trace
from gptscale.launchers.bench.memory.counted import count, facts_of
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight

pytestmark = pytest.mark.slow

SHAPE = "--n-layer 2 --n-head 4 --n-embd 64 --seq-len 64 --global-batch-size 8".split()


def traced(recipe, words, out, world):
    config, recipe_config = parse_run(recipe, [*words, "--data", "synthetic", "--device", "cpu", "--out", str(out)])
    plan = preflight(recipe, config, recipe_config, world)
    return trace(plan.run, recipe_config)


def test_the_counter_sees_every_allocation_and_the_views_of_none():
    counter = Counter()
    with counter.counting():
        a = torch.empty(1000)
        view = a[10:]
        counter.set_owner(7)
        b = view.clone()
        del a, view, b
    assert [tuple(row[1:]) for row in counter.events()] == [(4000, 0), (3960, 7), (-4000, 7), (-3960, 7)]


def test_the_counter_agrees_with_the_profiler_of_torch_on_forward_and_backward():
    layer, x = nn.Linear(64, 256), torch.randn(32, 64, requires_grad=True)

    def step():
        layer(x).square().sum().backward()

    step()
    counter = Counter()
    with counter.counting():
        step()
        counted = counter.events()[:, 1].cumsum().max()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        step()
    changes, left = [], list(record.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    held = peak = 0
    for _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    assert counted == peak


def test_the_state_of_one_process_is_counted_by_owner(tmp_path):
    timeline = traced("single", SHAPE, tmp_path, World(0, 0, 1, torch.device("cpu"), 60.0))
    h, layers = 64, 2
    n = layers * (12 * h * h + 13 * h) + (384 + 128 + 2) * h
    facts, parameters = facts_of(timeline), 12 * layers + 4
    assert facts["parameters"] == facts["gradients"] == 4 * n
    # Beside the moments, the optimizer keeps a count of steps for each parameter.
    assert facts["optimizer_state"] == 8 * n + 4 * parameters
    assert sum(timeline.by_owner(timeline.peak_at).values()) == timeline.peak
    curves = timeline.curves(0, timeline.times)
    assert (sum(curves.values()) == timeline.total).all()


def test_every_module_has_its_activations_and_names_are_those_of_the_whole_model(tmp_path):
    with fake_world(1, 4) as world:
        timeline = traced("fsdp", SHAPE, tmp_path, world)
    owners = timeline.by_owner(timeline.peak_at)
    assert {"activation of blocks.*.mlp.fc", "activation of blocks.*.attn.qkv", "gathered shard"} <= owners.keys()
    assert plain_name("module._forward_module.blocks.3.mlp") == "blocks.3.mlp"


@pytest.mark.parametrize("recipe", ["ddp", "fsdp", "tensor_parallel", "pipeline", "fairscale_sdp"])
def test_a_lone_rank_allocates_what_it_would_among_its_peers(recipe, tmp_path):
    program = Program("gptscale.launchers.bench.memory.counted", (str(tmp_path), "real", json.dumps([(recipe, SHAPE)])))
    assert launch(program, 2, environment=ENVIRONMENT) == 0
    for rank in range(2):
        real = json.loads((tmp_path / f"real-0-{rank}.json").read_text())
        with fake_world(rank, 2) as world:
            alone = facts_of(count((recipe, SHAPE), world, tmp_path))
        assert [alone[k] for k in ("parameters", "optimizer_state")] == [
            real[k] for k in ("parameters", "optimizer_state")
        ]
        # A thread of gloo frees its memory when it comes to it, so the peaks differ a little.
        assert alone["peak"] == pytest.approx(real["peak"], rel=0.03)


def test_the_first_and_the_last_stage_of_a_pipeline_differ(tmp_path):
    peaks = []
    for rank in (0, 3):
        with fake_world(rank, 4) as world:
            words = [*SHAPE, "--n-layer", "4", "--grad-accum-steps", "8", "--micro-batch-size", "1"]
            peaks.append(traced("pipeline", words, tmp_path, world))
    assert peaks[0].peak != peaks[1].peak
