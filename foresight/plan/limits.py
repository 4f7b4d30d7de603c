"""What limits a step: which of its resources shortens it most if it costs nothing."""

from __future__ import annotations

from collections.abc import Callable

from gptscale.foresight.time.simulator import Contention, play
from gptscale.foresight.time.split import Machines
from gptscale.foresight.time.work import LAUNCHES, Operation, StepWork

BUS, DISK_KINDS = ("copy to host", "copy from host"), ("disk read", "disk write")
HOST_KINDS = ("host optimizer", LAUNCHES)
COMPUTE, LINKS, BUBBLE = "compute", "links", "bubble"


def cause_of(operation: Operation, machines: Machines) -> str:
    """Return which resource an operation uses."""
    if operation.on == machines.link:
        return LINKS
    of_kind = {BUS: "bus", DISK_KINDS: "disk", HOST_KINDS: "host"}
    return next((cause for kinds, cause in of_kind.items() if operation.kind in kinds), COMPUTE)


def without_each(
    step: StepWork, seconds: Callable[[Operation], float], machines: Machines, contention: Contention | None = None
) -> dict[str, float]:
    """Return how long the step would be if each of its resources cost nothing, and if no stage waited for another."""
    causes = {cause_of(operation, machines) for operation in step.operations()}
    played = {}
    for cause in causes:

        def cheaper(operation: Operation, cause: str = cause) -> float:
            return 0.0 if cause_of(operation, machines) == cause else seconds(operation)

        played[cause] = play(step, cheaper, contention).seconds
    if len({item.rank for item in step.items}) > 1:
        played[BUBBLE] = play(_apart(step), seconds, contention).seconds
    return played


def _apart(step: StepWork) -> StepWork:
    """Return a step in which ranks do not wait for each other."""
    items = [
        item._replace(needs=tuple(place for place in item.needs if step.items[place].rank == item.rank))
        for item in step.items
    ]
    return StepWork(items, step.works)
