"""What a simulation says of a rank: what it needs, whether it fits, and what fills it."""

import numpy as np
import pytest

from gptscale.foresight.memory.constants import CONTEXT, NCCL, NCCL_MORE, outside_of_torch
from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.memory.timeline import Timeline

GIB = 2**30
OWNERS = {"parameter": 4, "activation of blocks.*.mlp": 2, "activation of blocks.*.attn": 3, "logits and loss": 1}


@pytest.fixture
def timeline():
    """Ten GiB that are allocated one owner after another, and all freed at the end."""
    born = np.arange(len(OWNERS))
    nbytes = np.array(list(OWNERS.values())) * GIB
    return Timeline(born, np.full(4, 4), nbytes, list(OWNERS), 5, [(0, "forward")], [0])


def test_each_further_group_of_ranks_has_buffers_of_its_own():
    assert outside_of_torch(0) == [CONTEXT]
    assert outside_of_torch(1) == [CONTEXT, NCCL]
    assert [constant.nbytes for constant in outside_of_torch(3)][2:] == [2 * NCCL_MORE.nbytes]


def test_a_rank_fits_if_what_torch_reserves_and_what_lies_beside_it_do(timeline):
    def memory(capacity, message=""):
        reserved = 12 * GIB
        return RankMemory(0, timeline, 11 * GIB, reserved, capacity, constants=[CONTEXT], out_of_memory=message)

    needed = 12 * GIB + CONTEXT.nbytes
    assert [memory(capacity).fits for capacity in (needed, needed - 1)] == [True, False]
    assert memory(needed, "CUDA out of memory").fits is False


def test_a_rank_that_the_host_cannot_hold_does_not_fit(timeline):
    def memory(host, host_capacity):
        return RankMemory(0, timeline, GIB, GIB, 80 * GIB, 3 * GIB, host, host_capacity=host_capacity)

    limits = ((0, 4 * GIB), (1, 4 * GIB), (1, None))
    assert [memory(4 * GIB + more, most).fits for more, most in limits] == [True, False, True]
    assert memory(4 * GIB, 5 * GIB).as_json()["host_capacity_bytes"] == 5 * GIB
