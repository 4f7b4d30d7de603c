"""When pieces of work that need each other begin and end: those of a recorded step, and of traced ones."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence


def schedule(needs: Sequence[Collection[int]], seconds: Callable[[int, float], float]) -> list[tuple[float, float]]:
    """Return when each piece of work begins and ends. It begins as soon as the places that it needs have ended.

    seconds: of a place that begins at such a time. Raises ValueError if pieces wait for each other for ever.
    """
    followers: dict[int, list[int]] = defaultdict(list)
    for place, others in enumerate(needs):
        for other in others:
            followers[other].append(place)
    waiting = [len(others) for others in needs]
    able = [place for place, n in enumerate(waiting) if not n]
    times = dict[int, tuple[float, float]]()
    while able:
        # The piece that was asked for first begins first.
        place = heapq.heappop(able)
        begin = max((times[other][1] for other in needs[place]), default=0.0)
        times[place] = (begin, begin + seconds(place, begin))
        for follower in followers[place]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(able, follower)
    if len(times) < len(needs):
        raise ValueError(f"the step never ends: {len(needs) - len(times)} pieces wait for each other")
    return [times[place] for place in range(len(needs))]
