"""The bound of memory: state to the byte by sums made by hand, and all of it beside what ranks of the mock allocated."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned_runs import planned_words
from torch.autograd.graph import saved_tensors_hooks

from gptscale.common.model.gpt import Block
from gptscale.common.process import environments
from gptscale.common.process.world import World
from gptscale.foresight.memory.bound import HOLDERS, bound
from gptscale.foresight.plan.rows import ALLOWANCE
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import resolve
from gptscale.recipes import RECIPES, get

# Bytes that 255 ranks allocated under the mock of CUDA (2026-11-23, torch 2.11).
ROWS = Path(__file__).parents[3] / "results" / "measured" / "2026-11-23-mock-closed-forms.csv"
H, ROOT, T = 64, (384 + 128) * 64, 64
SHAPE = f"--n-layer 2 --n-head 4 --n-embd {H} --vocab-size 384 --seq-len {T} --global-batch-size 8".split()
A_BLOCK = 12 * H * H + 13 * H
# Each of 28 tensors has a count of steps.
N, STEPS = 2 * A_BLOCK + ROOT + 2 * H, 4 * (2 * 12 + 4)
# The first of two stages has a block and both tables. Tensor ranks cut those, and of a block matrices and three biases.
STAGE, CUT = A_BLOCK + ROOT, 2 * (6 * H * H + 7 * H // 2 + 6 * H) + ROOT // 2 + 2 * H
STATES = [
    ("single", "fp32", 4 * N, 8 * N + STEPS),
    ("ddp", "bf16", 4 * N, 8 * N + STEPS),
    ("fsdp", "fp32", 2 * N, 4 * N + STEPS),
    # Matrices of blocks, 24 H^2 elements, have a momentum alone.
    ("fsdp", "fp32 --optimizer muon", 2 * N, 4 * N - 2 * 24 * H * H + STEPS),
    ("context_parallel", "fp32", 2 * N, 4 * N + STEPS),
    ("zero1", "bf16", 2 * N, 2 * N + 4 * N + 8),
    ("zero2", "fp32", 4 * N, 2 * N + 4 * N + 8),
    ("zero3", "bf16", N, 6 * N),
    ("fairscale_sdp", "fp32", 4 * N, 8 * N + STEPS),
    ("tensor_parallel", "fp32", 4 * CUT, 8 * CUT + STEPS),
    ("pipeline", "fp32", 4 * STAGE, 8 * STAGE + 4 * 14),
]


@pytest.mark.parametrize(("recipe", "precision", "parameters", "optimizer"), STATES)
def test_state_is_the_sum_made_by_hand(recipe, precision, parameters, optimizer):
    nproc, words = 2 if get(recipe).axes else 1, [*SHAPE, "--precision", *precision.split()]
    first, *last = (bound(*planned_words(recipe, words, nproc, rank)).device for rank in range(nproc))
    assert first["parameter"] == parameters
    # whole parameters that are another's
    rest = last[0]["optimizer state"] if recipe == "fairscale_sdp" else 0
    assert first["optimizer state"] + rest == optimizer


def test_a_stage_may_hold_the_head_alone():
    """So the balanced stages of GPT-2 are cut: its head is as heavy as five blocks."""
    words = "--model gpt2 --pp-size 4 --device cuda --global-batch-size 16".split()
    assert bound(*planned_words("hybrid_3d", words, 8, 7)).device["parameter"] == 4 * (50304 + 2) * 768 // 2


@pytest.mark.slow
def test_the_bound_is_within_the_allowance_of_what_ranks_allocated():
    ratios = []
    for row in csv.DictReader(ROWS.open(newline="")):
        recipe, rank = row["recipe"], int(row["rank"])
        if row["allocated"] and environments.installed("torch", get(recipe).environment):
            config, own = parse_run(recipe, row["options"].split())
            world = World(rank, rank % 8, int(row["nproc"]), torch.device("cuda", 0), 60.0)
            ratios.append(bound(resolve(recipe, config, own, world), own).on_device / int(row["allocated"]))
    assert len(ratios) >= 200
    assert 1 / ALLOWANCE <= min(ratios) <= max(ratios) <= 1.11


def test_what_a_block_keeps_is_what_autograd_saves():
    run, config = planned_words("single", [*SHAPE, "--grad-accum-steps", "1"], 1, 0)
    block, saved = Block(run.gpt), {}
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    with saved_tensors_hooks(lambda x: saved.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x):
        block(torch.randn(8, T, H, requires_grad=True))
    nbytes = sum(x.untyped_storage().nbytes() for at, x in saved.items() if at not in own)
    # attention's kernel saves its random state too: two numbers of 8 bytes, or none
    assert 0 <= nbytes - bound(run, config).device["activation"] / 2 <= 16


def test_each_recipe_names_a_layout_that_has_a_bound():
    assert set(HOLDERS) == {row.memory for row in RECIPES.values()}


def test_what_is_offloaded_is_on_the_host_or_on_disk():
    for recipe, host, disk in (("fsdp_offload", 16 * N + STEPS, 0), ("zero_infinity", 24 * N, 18 * N)):
        run, own = planned_words(recipe, [*SHAPE, "--precision", "bf16"], 1, 0)
        on_cuda = bound(replace(run, world=replace(run.world, device=torch.device("cuda", 0))), own)
        assert (on_cuda.host, on_cuda.disk) == (host, disk)
        assert bound(run, own).device["other"] == host
