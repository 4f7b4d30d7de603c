"""What a simulation says of a rank: what it needs, and whether it fits."""

import numpy as np

from gptscale.foresight.memory.constants import CONTEXT, NCCL, NCCL_MORE, outside_of_torch
from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.memory.timeline import Timeline

GIB = 2**30
TIMELINE = Timeline(np.array([0]), np.array([4]), np.array([GIB]), ["parameter"], 5, [(0, "forward")], [0])


def test_each_further_group_of_ranks_has_buffers_of_its_own():
    assert outside_of_torch(0) == [CONTEXT]
    assert outside_of_torch(1) == [CONTEXT, NCCL]
    assert [constant.nbytes for constant in outside_of_torch(3)][2:] == [2 * NCCL_MORE.nbytes]


def test_a_rank_fits_if_what_torch_reserves_and_what_lies_beside_it_do():
    def memory(capacity, message=""):
        return RankMemory(0, TIMELINE, 11 * GIB, 12 * GIB, capacity, constants=[CONTEXT], out_of_memory=message)

    needed = 12 * GIB + CONTEXT.nbytes
    assert [memory(capacity).fits for capacity in (needed, needed - 1)] == [True, False]
    assert memory(needed, "CUDA out of memory").fits is False


def test_a_rank_that_the_host_cannot_hold_does_not_fit():
    def memory(host, host_capacity):
        return RankMemory(0, TIMELINE, GIB, GIB, 80 * GIB, 3 * GIB, host, host_capacity=host_capacity)

    limits = ((0, 4 * GIB), (1, 4 * GIB), (1, None))
    assert [memory(4 * GIB + more, most).fits for more, most in limits] == [True, False, True]
    assert memory(4 * GIB, 5 * GIB).as_json()["host_capacity_bytes"] == 5 * GIB
