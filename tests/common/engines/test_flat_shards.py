"""Ranges of flattened tensors as boxes: together the boxes cover the range, and each lies where it says."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from gptscale.common.engines.flat_shards import shards_of_range


@given(st.data())
def test_boxes_tile_exactly_the_range_and_share_its_memory(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    n = math.prod(shape)
    begin = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(begin + 1, n))
    full = torch.arange(n).view(shape)
    flat = full.flatten()[begin:end].clone()
    boxes = list(shards_of_range("x", flat, shape, begin))
    assert len(boxes) <= 2 * len(shape) - 1
    covered = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        assert torch.equal(full[box.box], box.tensor)
        covered[box.box] += 1
    assert torch.equal(covered.flatten(), ((torch.arange(n) >= begin) & (torch.arange(n) < end)).long())
    for box in boxes:
        box.tensor.fill_(-1)
    assert (flat == -1).all()
