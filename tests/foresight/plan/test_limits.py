"""What limits a step, on steps that can be played by hand."""

import pytest

from gptscale.foresight.plan.limits import BUBBLE, COMPUTE, LINKS, cause_of, without_each
from gptscale.foresight.time.simulator import play
from gptscale.foresight.time.split import Machines
from gptscale.foresight.time.work import COMPUTE as COMPUTING
from gptscale.foresight.time.work import P2P, REDUCE, Operation, StepWork

MACHINES = Machines("a gpu", 8, "a link")
PRODUCT, MESSAGE = Operation("product", (), "a gpu"), Operation("send", (), "a link")


@pytest.mark.parametrize(
    ("operation", "cause"),
    [
        (PRODUCT, "compute"),
        (MESSAGE, "links"),
        (Operation("copy to host", (), "a gpu"), "bus"),
        (Operation("copy from host", (), "a gpu"), "bus"),
        (Operation("disk read", (), "a gpu"), "disk"),
        (Operation("host optimizer", (), "a gpu"), "host"),
        # The kind says nothing of an operation on a link.
        (Operation("copy to host", (), "a link"), "links"),
    ],
)
def test_an_operation_uses_one_resource(operation, cause):
    assert cause_of(operation, MACHINES) == cause


def test_a_step_without_each_resource_and_without_waits_between_stages():
    """Rank 0 computes 3 s and sends for 1 s, and then rank 1 computes 2 s: 6 s in all."""
    step = StepWork()
    first = step.add("forward", 0, COMPUTING, {PRODUCT: 3.0})
    sent = step.add("send", 0, P2P, {MESSAGE: 1.0}, [first])
    step.add("forward", 1, COMPUTING, {PRODUCT: 2.0}, [sent])
    played = play(step, lambda operation: 1.0)
    without = without_each(step, lambda operation: 1.0, MACHINES)
    assert played.seconds == 6.0
    # Without waits rank 0 is the longer one, with what it sends.
    assert without == {COMPUTE: 1.0, LINKS: 5.0, BUBBLE: 4.0}


def test_what_is_hidden_limits_nothing():
    """A reduction of 2 s runs beside products of 3 s."""
    step = StepWork()
    step.add("reduce", 0, REDUCE, {MESSAGE: 2.0})
    step.add("backward", 0, COMPUTING, {PRODUCT: 3.0})
    without = without_each(step, lambda operation: 1.0, MACHINES)
    # One rank has no stages to wait for.
    assert without == {COMPUTE: 2.0, LINKS: 3.0}
