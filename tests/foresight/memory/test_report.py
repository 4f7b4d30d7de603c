"""What a simulation says of a rank: what it needs, whether it fits, and what fills it."""

import numpy as np
import pytest

from gptscale.foresight.memory.constants import CONTEXT, NCCL, NCCL_MORE, outside_of_torch
from gptscale.foresight.memory.report import RankMemory
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
