"""What the ranks of a world agree on."""

import pytest
import torch.distributed as dist

from gptscale.common.process.world import agree_any


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_one_rank_that_says_yes_is_enough(monkeypatch, own, other):
    def all_reduce(votes, op):
        assert op == dist.ReduceOp.MAX
        votes.clamp_(min=float(other))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    said = agree_any(own)
    monkeypatch.undo()
    assert said is (own or other)
