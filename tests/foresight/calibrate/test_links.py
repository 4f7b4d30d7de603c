"""The groups of ranks whose collectives a calibration measures."""

import pytest

from gptscale.foresight.calibrate.links import group_shapes


def test_two_ranks_are_one_group():
    assert group_shapes(2, 2) == {(2, 2): 1}


@pytest.mark.parametrize(("world", "per_node"), [(8, 8), (16, 8), (12, 4)])
def test_the_groups_of_every_split_are_measured(world, per_node):
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for tp in divisors:
        for dp in (n for n in divisors if n > 1 and world % (n * tp) == 0):
            members = [tp * i for i in range(dp)]
            on_node = sum(member < per_node for member in members)
            assert (dp, on_node) in group_shapes(world, per_node)
