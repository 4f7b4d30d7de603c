"""Exchanges are noted as they begin, on two real ranks, and cost an untraced step nothing."""

import torch
import torch.distributed as dist
from worlds import ranks

from gptscale.common.measure.exchanges import ExchangeLog, _nbytes


def test_two_ranks_note_the_same_exchanges_and_what_each_wait_is_for():
    ranks("world_exchanges.py", 2)


def test_functions_are_torchs_own_when_nobody_watches_even_after_an_error():
    own = dist.all_reduce
    try:
        with ExchangeLog().watching():
            assert dist.all_reduce is not own
            raise ValueError
    except ValueError:
        pass
    assert dist.all_reduce is own


def test_bytes_are_those_of_the_larger_side():
    one, two = torch.zeros(2), torch.zeros(4)
    assert _nbytes((one, two)) == 16
    assert _nbytes(([one, one, one], two)) == 24
    assert _nbytes((None, 3)) == 0
