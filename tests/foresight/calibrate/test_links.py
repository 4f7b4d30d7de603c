"""The groups of ranks whose collectives a calibration measures."""

import pytest

from gptscale.foresight.calibrate.links import group_sizes
from gptscale.foresight.time.operations import message_shape
from gptscale.foresight.time.split import Machines, StepWriter


def test_two_ranks_are_one_group():
    assert group_sizes(2, 2) == [(2, 1)]


@pytest.mark.parametrize(("world", "per_node"), [(8, 8), (16, 8), (12, 4)])
def test_every_group_of_a_split_has_a_measured_one_of_its_shape(world, per_node):
    measured = {message_shape(2**20, ranks, stride, per_node) for ranks, stride in group_sizes(world, per_node)}
    write = StepWriter.__new__(StepWriter)
    write.machines = Machines("h100-80", per_node, "nvlink4 ib-3200")
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    asked = {
        write.on_link("all-reduce", 2**20, dp, tp).shape
        for tp in divisors
        for dp in divisors
        if dp > 1 and world % (dp * tp) == 0
    }
    assert asked == measured


def test_other_jobs_take_their_part_of_the_links_between_nodes_only():
    assert message_shape(8, 16, 1, 8, jobs=3).sharing == 3
    assert message_shape(8, 4, 8, 8, jobs=3).sharing == 24
    assert message_shape(8, 8, 1, 8, jobs=3).sharing == 1
