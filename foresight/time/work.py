"""The work of one step: items on the streams of ranks, each made of operations, with what must be done before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# The streams of a rank. An item waits for the earlier items of its own stream.
COMPUTE, GATHER, REDUCE, P2P = "compute", "gather", "reduce", "p2p"
TO_HOST, FROM_HOST, DISK, HOST = "to host", "from host", "disk", "host"
# The kind of what the host does to start the kernels and collectives of a work, while the device carries them out.
LAUNCHES = "launches"
# Before the kind of a collective that is sent beside the products of the same work.
BESIDE = "beside: "


class Operation(NamedTuple):
    """One kind of work on one shape, on a device or over a link: what seconds are calibrated for.

    kind: a name in operations.KINDS. shape: its numbers, in the order that the kind defines. on: a device or a link.
    """

    kind: str
    shape: tuple[int, ...]
    on: str


# How many of each operation an item does, one after another.
Work = Mapping[Operation, float]


class Item(NamedTuple):
    """Work on one stream of one rank. work: its place in `StepWork.works`. needs: places in `StepWork.items`."""

    name: str
    rank: int
    stream: str
    work: int
    needs: tuple[int, ...]


@dataclass
class StepWork:
    """What one training step does. Ranks that do the same at the same time may be written once."""

    items: list[Item] = field(default_factory=list)
    works: list[dict[Operation, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._places = {_key(work): i for i, work in enumerate(self.works)}
        self._before: list[tuple[int, ...]] | None = None
        self._order: list[int] | None = None

    def place_of(self, work: Work) -> int:
        """Return the place of a work in `works`, where equal works are once."""
        key = _key(work)
        place = self._places.setdefault(key, len(self.works))
        if place == len(self.works):
            self.works.append(dict(key))
        return place

    def add(self, name: str, rank: int, stream: str, work: Work | int, needs: Sequence[int] = ()) -> int:
        """Append an item to a stream and return its place.

        work: what it does, or its place. needs: places of items, of which some may be added later.
        """
        place = work if isinstance(work, int) else self.place_of(work)
        self.items.append(Item(name, rank, stream, place, tuple(needs)))
        self._before = self._order = None
        return len(self.items) - 1

    def add_collective(self, name: str, stream: str, work: Work, needs: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Append an item to each rank of `needs` and return their places. None begins before all ranks have arrived."""
        arrivals = [self.add(f"{name} arrives", rank, stream, {}, before) for rank, before in needs.items()]
        return {rank: self.add(name, rank, stream, work, arrivals) for rank in needs}

    def before(self) -> list[tuple[int, ...]]:
        """Return for each item the items that must end before it begins: its needs and the item before it in its stream."""
        if self._before is None:
            last: dict[tuple[int, str], int] = {}
            self._before = []
            for place, item in enumerate(self.items):
                earlier = last.get((item.rank, item.stream))
                self._before.append(item.needs if earlier is None else (*item.needs, earlier))
                last[item.rank, item.stream] = place
        return self._before

    def order(self) -> list[int]:
        """Return the places of all items, each behind all that must end before it.

        Raises ValueError if items wait for each other for ever.
        """
        if self._order is None:
            before = self.before()
            n_waiting = [len(others) for others in before]
            followers: list[list[int]] = [[] for _ in before]
            for place, others in enumerate(before):
                for other in others:
                    followers[other].append(place)
            order = [place for place, n in enumerate(n_waiting) if not n]
            for place in order:
                for follower in followers[place]:
                    n_waiting[follower] -= 1
                    if not n_waiting[follower]:
                        order.append(follower)
            if len(order) < len(before):
                raise ValueError(f"the step never ends: {len(before) - len(order)} items wait for each other")
            self._order = order
        return self._order

    def operations(self) -> set[Operation]:
        """Return every operation of the step."""
        return {operation for work in self.works for operation in work}


def _key(work: Work) -> tuple[tuple[Operation, float], ...]:
    return tuple(sorted((operation, float(n)) for operation, n in work.items() if n))


def added(*works: Work) -> dict[Operation, float]:
    """Return the sum of works."""
    total: dict[Operation, float] = {}
    for work in works:
        for operation, n in work.items():
            total[operation] = total.get(operation, 0.0) + n
    return total


def times(n: float, work: Work) -> dict[Operation, float]:
    """Return a work done n times."""
    return {operation: n * count for operation, count in work.items()}
