"""The event simulation, held to closed forms: bubbles of schedules, overlap, late ranks, contention."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptscale.foresight.time.schedules import BACKWARD, FORWARD, gpipe, interleaved, needs, one_forward_one_backward
from gptscale.foresight.time.simulator import Contention, play, seconds_of
from gptscale.foresight.time.work import BESIDE, COMPUTE, GATHER, LAUNCHES, Operation, StepWork

UNIT = Operation("host", (), "a device")
LINK = Operation("host", (), "a link")
LAUNCH = Operation(LAUNCHES, (1,), "a device")


def seconds(operation):
    return 1.0


def pipeline(order, n_stages, forward=1.0, backward=2.0, extra=0.0):
    """Return the step of a schedule without transfers. extra: what the last stage computes more, in each direction."""
    step, places = StepWork(), {}
    for rank, computations in order.items():
        for kind, stage, m in computations:
            n = (forward if kind == FORWARD else backward) + extra * (stage == n_stages - 1)
            places[kind, stage, m] = step.add(f"{kind}{m}", rank, COMPUTE, {UNIT: n})
    for (kind, stage, m), place in places.items():
        waits = [places[need] for need in needs(kind, stage, m, n_stages)]
        waits += [places[FORWARD, stage, m]] if kind == BACKWARD else []
        step.items[place] = step.items[place]._replace(needs=tuple(waits))
    return step


@given(p=st.integers(1, 8), m=st.integers(1, 24), make=st.sampled_from((gpipe, one_forward_one_backward)))
@settings(max_examples=60, deadline=None)
def test_the_bubble_of_equal_stages_is_p_minus_1_over_m_plus_p_minus_1(p, m, make):
    length = play(pipeline(make(p, m), p), seconds).seconds
    assert 1 - 3 * m / length == pytest.approx((p - 1) / (m + p - 1))


@given(p=st.integers(2, 6), rounds=st.integers(1, 4), v=st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(p, rounds, v):
    m = rounds * p
    length = play(pipeline(interleaved(p, v, m), p * v), seconds).seconds
    assert length == pytest.approx(3 * (m * v + p - 1))


def test_the_longest_stage_sets_the_pace():
    """(m - 1) times the longest stage, and each stage once."""
    p, m, head = 4, 10, 0.7
    length = play(pipeline(one_forward_one_backward(p, m), p, extra=head), seconds).seconds
    longest = 3 + 2 * head
    assert length == pytest.approx((m - 1) * longest + 3 * (p - 1) + longest)


def gathered(n_blocks, compute, gather):
    """Return blocks that each wait for their own gather, which runs ahead on its stream."""
    step = StepWork()
    for _ in range(n_blocks):
        ready = step.add("gather", 0, GATHER, {LINK: gather})
        step.add("compute", 0, COMPUTE, {UNIT: compute}, (ready,))
    return step


@pytest.mark.parametrize(("compute", "gather"), [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0)])
def test_a_gather_hides_behind_the_block_before(compute, gather):
    n = 7
    length = play(gathered(n, compute, gather), seconds).seconds
    assert length == pytest.approx(gather + n * compute if compute >= gather else n * gather + compute)


def test_a_collective_begins_when_the_last_rank_has_come():
    step = StepWork()
    computed = {rank: step.add("compute", rank, COMPUTE, {UNIT: 2.0}) for rank in range(3)}
    step.add_collective("reduce", "reduce", {LINK: 1.0}, {rank: (place,) for rank, place in computed.items()})
    assert play(step, seconds).seconds == 3.0
    late = play(step, seconds, slow_ranks={1: 2.5})
    assert late.seconds == 6.0
    assert step.items[late.critical_path()[0]].rank == 1


def test_contention_stretches_what_runs_at_once_and_nothing_else():
    step = StepWork()
    step.add("gather", 0, GATHER, {LINK: 2.0})
    step.add("compute", 0, COMPUTE, {UNIT: 4.0})
    # While the gather runs, 2 s, the product advances 2 / 1.25 s. It needs 2.4 s more.
    assert play(step, seconds, Contention(compute=1.25)).seconds == pytest.approx(2 + 4 - 2 / 1.25)
    # A gather that takes twice as long beside the product: 4 s, all of them beside it.
    assert play(step, seconds, Contention(compute=1.0, communication=2.0)).seconds == pytest.approx(4.0)
    apart = StepWork()
    first = apart.add("gather", 0, GATHER, {LINK: 2.0})
    apart.add("compute", 0, COMPUTE, {UNIT: 4.0}, (first,))
    assert play(apart, seconds, Contention(1.9, 1.9)).seconds == pytest.approx(6.0)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_both_ways_of_playing_agree_and_the_critical_path_fills_the_step(seed):
    rng = random.Random(seed)
    step = StepWork()
    for i in range(rng.randrange(1, 30)):
        waits = rng.sample(range(i), min(i, rng.randrange(3)))
        step.add(str(i), rng.randrange(3), rng.choice((COMPUTE, GATHER)), {UNIT: rng.randrange(4)}, waits)
    timeline = play(step, seconds)
    events = play(step, seconds, Contention(1 + 1e-15))
    assert events.seconds == pytest.approx(timeline.seconds)
    assert sum(timeline.shares(seconds).values()) == pytest.approx(1 if timeline.seconds else 0)


def test_items_that_wait_for_each_other_are_refused():
    step = StepWork()
    step.add("a", 0, COMPUTE, {UNIT: 1.0}, (1,))
    step.add("b", 1, COMPUTE, {UNIT: 1.0}, (0,))
    with pytest.raises(ValueError, match="2 items wait"):
        play(step, seconds)


def test_the_host_launches_while_the_device_works_and_the_slower_counts():
    """So does what is sent beside products. What is sent in between holds up all of them."""
    beside = Operation(f"{BESIDE}host", (), "a link")
    assert seconds_of({UNIT: 9.0, LAUNCH: 1.0}, seconds) == pytest.approx(9, rel=1e-3)
    assert seconds_of({UNIT: 1.0, LAUNCH: 20.0}, seconds) == pytest.approx(20, rel=1e-3)
    assert seconds_of({UNIT: 9.0, LINK: 3.0, LAUNCH: 1.0}, seconds) == pytest.approx(9 + 3, rel=1e-3)
    assert seconds_of({UNIT: 9.0, beside: 30.0, LAUNCH: 1.0}, seconds) == pytest.approx(30, rel=1e-2)
    step = StepWork()
    for _ in range(3):
        step.add("work", 0, COMPUTE, {UNIT: 2.0, LAUNCH: 2.0, LINK: 2.0})
    played = play(step, seconds)
    shares = played.shares(seconds)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares[UNIT] == shares[LAUNCH] < shares[LINK]
    # A share is how far the step follows the operation.
    longer = play(step, lambda operation: 1.001 if operation == LAUNCH else 1.0)
    assert longer.seconds / played.seconds - 1 == pytest.approx(1e-3 * shares[LAUNCH], rel=0.01)
