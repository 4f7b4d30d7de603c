"""The pieces of traced steps, and how long they last if some of them are shorter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

# The stream of what a rank does itself.
COMPUTE = "compute"


class TracedPiece(NamedTuple):
    """A part of a traced step on a stream of a rank.

    needs: places of pieces that end before it begins, beside the one before it on its stream. processor: the share of its seconds
    in which its thread had a processor. micro_batch: that of its mark. ranks: of a transfer, those that take part.
    """

    kind: str
    rank: int
    stream: str
    seconds: float
    needs: tuple[int, ...] = ()
    micro_batch: int = -1
    processor: float = 1.0
    ranks: frozenset[int] = frozenset()


# How many times as long a piece lasts.
Factor = Callable[[TracedPiece], float]


def order_of(pieces: Sequence[TracedPiece]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the places of pieces, each behind those that end before it, and of each the places of these.

    Raises ValueError if pieces wait for each other for ever.
    """
    last: dict[tuple[int, str], int] = {}
    before = list[tuple[int, ...]]()
    followers: dict[int, list[int]] = defaultdict(list)
    for place, piece in enumerate(pieces):
        earlier = last.get((piece.rank, piece.stream))
        before.append(piece.needs if earlier is None else (*piece.needs, earlier))
        last[piece.rank, piece.stream] = place
        for other in before[place]:
            followers[other].append(place)
    waiting = [len(others) for others in before]
    order = [place for place, n in enumerate(waiting) if not n]
    for place in order:
        for follower in followers[place]:
            waiting[follower] -= 1
            if not waiting[follower]:
                order.append(follower)
    if len(order) < len(before):
        raise ValueError(f"the step never ends: {len(before) - len(order)} pieces wait for each other")
    return order, before


def play(pieces: Sequence[TracedPiece], factor: Factor) -> float:
    """Return how long pieces last together, each as many times as long as `factor` says."""
    order, before = order_of(pieces)
    ends = [0.0] * len(pieces)
    for place in order:
        begin = max((ends[other] for other in before[place]), default=0.0)
        ends[place] = begin + pieces[place].seconds * factor(pieces[place])
    return max(ends, default=0.0)
