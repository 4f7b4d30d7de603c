"""What a simulation says of a rank: what it needs, whether it fits, and what fills it."""

import json

import numpy as np
import pytest

from gptscale.foresight.memory.constants import CONTEXT, NCCL, NCCL_MORE, outside_of_torch
from gptscale.foresight.memory.report import RankMemory, filled_by, merged
from gptscale.foresight.memory.timeline import Allocations, Timeline

GIB = 2**30
OWNERS = {"parameter": 4, "activation of blocks.*.mlp": 2, "activation of blocks.*.attn": 3, "logits and loss": 1}


@pytest.fixture
def timeline():
    """Ten GiB that are allocated one owner after another, and all freed at the end."""
    born = np.arange(len(OWNERS))
    nbytes = np.array(list(OWNERS.values())) * GIB
    return Timeline(Allocations(born, np.full(4, 4), nbytes, list(OWNERS)), 5, [(0, "forward")], [0])


@pytest.mark.parametrize(
    ("communicators", "constants"),
    [
        (0, [CONTEXT.nbytes]),
        (1, [CONTEXT.nbytes, NCCL.nbytes]),
        (3, [CONTEXT.nbytes, NCCL.nbytes, 2 * NCCL_MORE.nbytes]),
    ],
)
def test_each_further_group_of_ranks_has_buffers_of_its_own(communicators, constants):
    assert [constant.nbytes for constant in outside_of_torch(communicators)] == constants
    assert all(constant.source for constant in outside_of_torch(communicators))


def test_a_rank_fits_if_what_torch_reserves_and_what_lies_beside_it_do(timeline):
    def memory(capacity, message=None):
        reserved = 12 * GIB
        return RankMemory(0, timeline, 11 * GIB, reserved, capacity, constants=[CONTEXT], out_of_memory=message)

    needed = 12 * GIB + CONTEXT.nbytes
    assert memory(None).needed == needed
    assert memory(None).fits is None
    assert memory(needed).fits is True
    assert memory(needed - 1).fits is False
    assert memory(None, "CUDA out of memory").fits is False


def test_a_rank_that_the_host_cannot_hold_does_not_fit(timeline):
    def memory(host, host_capacity):
        return RankMemory(0, timeline, GIB, GIB, 80 * GIB, 3 * GIB, host, host_capacity=host_capacity)

    assert memory(4 * GIB, 4 * GIB).fits is True
    assert memory(4 * GIB + 1, 4 * GIB).fits is False
    assert memory(4 * GIB + 1, None).fits is True
    assert memory(4 * GIB, 5 * GIB).as_json()["host_capacity_bytes"] == 5 * GIB


def test_activations_of_all_modules_are_one_owner(timeline):
    assert merged(timeline.by_owner(timeline.peak_at)) == {
        "activation": 5 * GIB,
        "parameter": 4 * GIB,
        "logits and loss": GIB,
    }
    rank = RankMemory(0, timeline, 10 * GIB, 10 * GIB)
    assert filled_by(rank, most=2) == "activations 5.0 GiB, parameter 4.0 GiB"


def test_its_json_has_bytes_that_add_up_to_the_peak(timeline):
    rank = RankMemory(3, timeline, 11 * GIB, 12 * GIB, constants=outside_of_torch(1), extra={"grade": "simulated"})
    facts = json.loads(json.dumps(rank.as_json()))
    assert sum(facts["peak_by_owner_bytes"].values()) == facts["peak_allocated_bytes"] == 11 * GIB
    assert facts["peak_by_owner_bytes"]["rounding of blocks"] == GIB
    assert facts["needed_bytes"] == facts["peak_reserved_bytes"] + sum(facts["outside_of_torch_bytes"].values())
    assert facts["fragmentation"] == pytest.approx(1 / 12)
    assert (facts["peak_part"], facts["fits"], facts["grade"]) == ("forward", None, "simulated")
