"""Replayed steps last as long as they did, and without a cause as long as they would."""

import pytest
from made_traces import HEALTHY, Part, trace

from gptscale.common.measure.step_trace import COMPUTING, TRANSFER, host_share
from gptscale.foresight.verdict.replay import Replay, find_waits
from gptscale.foresight.verdict.shares import (
    host_shares,
    shares_of,
    slowed,
    waiting_for,
    with_one_micro_batch,
    with_processors,
    with_rank_as_others,
    without,
    without_host,
)

BOTH = (0, 1)
REDUCE = ("all_reduce", BOTH, 4096)


def replay_of(*ranks):
    return Replay([trace(rank, parts) for rank, parts in enumerate(ranks)])


def reduced(compute_s, wait_s):
    """Return a step that computes, exchanges, and waits for that."""
    return [Part("backward", False, compute_s), Part("backward", True, wait_s, 0, REDUCE)]


LATE = [reduced(0.05, 0.06), reduced(0.1, 0.01)]


def test_others_wait_for_a_late_rank_and_then_for_the_transfer():
    replay = replay_of(*LATE)
    # With nothing changed, steps last as long as they did.
    assert replay.step_s() == pytest.approx(0.11)
    assert [w.transfer_s for w in replay.waits.values()] == pytest.approx([0.01] * 6)
    assert waiting_for(replay, late=1) == pytest.approx(0.05 / 0.11)
    assert replay.most_own_work() == (1, pytest.approx(2.0))
    assert replay.step_s(without(TRANSFER)) == pytest.approx(0.1)
    assert replay.step_s(with_rank_as_others(replay, 1, 1.1)) == pytest.approx(0.06)
    assert replay.step_s(ranks_wait=False) == pytest.approx(0.11)
    assert replay.last_step()[0] == [
        ("backward", 0.0, pytest.approx(0.05)),
        ("waiting", pytest.approx(0.05), pytest.approx(0.1)),
        (TRANSFER, pytest.approx(0.1), pytest.approx(0.11)),
    ]


def test_a_transfer_behind_computation_costs_its_visible_part_alone():
    # The same exchange twice: seen from its begin on, where it takes 0.05 s, and begun 0.03 s before the wait for it.
    hidden = [*reduced(0.02, 0.05), Part("backward", False, 0.03, begins=REDUCE), Part("backward", True, 0.02, 1)]
    replay = replay_of(hidden, hidden)
    assert replay.step_s() == pytest.approx(0.12)
    assert sorted(w.hidden_s for w in replay.waits.values()) == pytest.approx([0.0] * 6 + [0.03] * 6)
    assert replay.step_s(without(TRANSFER)) == pytest.approx(0.05)
    # With no computation to hide behind, it is seen as a whole.
    assert replay.step_s(without("backward")) == pytest.approx(0.1)


def test_waits_that_do_not_tell_their_exchange_are_matched_by_their_order():
    unnamed = [[Part("backward", False, s), Part("backward", True, 0.11 - s)] for s in (0.05, 0.1)]
    assert replay_of(*unnamed).step_s(without(TRANSFER)) == pytest.approx(0.1)
    # Or, where ranks have different numbers of them, by what the others ended just before.
    stages = [
        [Part("forward", False, 0.04), Part("forward", True, 0.08)],
        [*(Part("forward", *p) for p in ((True, 0.04), (False, 0.04), (True, 0.01))), Part("data", False, 0.03)],
    ]
    traces = [trace(rank, parts, steps=1) for rank, parts in enumerate(stages)]
    waits = find_waits(traces, [t.segments for t in traces])
    assert [(w.rank, dict(w.begun)) for w in waits][1:] == [
        (1, {0: pytest.approx(100.04)}),
        (1, {0: pytest.approx(100.04)}),
    ]


def test_a_wait_is_for_no_exchange_that_another_rank_begins_after_its_end():
    """As many waits on each rank are not always those of the same exchanges: such steps waited for each other for ever."""
    parts = [
        [Part("forward", False, 0.01), Part("forward", True, 0.01), Part("forward", False, 0.08)],
        [Part("forward", False, 0.06), Part("forward", True, 0.04)],
    ]
    traces = [trace(rank, of_rank, steps=1) for rank, of_rank in enumerate(parts)]
    assert [dict(w.begun) for w in find_waits(traces, [t.segments for t in traces])] == [
        {},
        {0: pytest.approx(100.01), 1: pytest.approx(100.06)},
    ]


def test_clocks_of_two_machines_are_compared_by_their_barrier():
    traces = [trace(0, LATE[0]), trace(1, LATE[1], machine="other", behind=7.0)]
    replay = Replay(traces)
    assert replay.step_s() == pytest.approx(0.11)
    assert [w.transfer_s for w in replay.waits.values()] == pytest.approx([0.01] * 6)


def test_without_the_host_what_it_delays_is_earlier():
    replay = replay_of(HEALTHY)
    host = {"forward": 0.5, "backward": 0.25, "optimizer": 0.0}
    assert replay.step_s(without_host(host)) == pytest.approx(0.096 - 0.015 - 0.015)


def test_micro_batches_in_one_leave_what_does_not_shrink_once():
    parts = [Part("forward", False, 0.01, micro_batch=i) for i in range(4)] + [
        Part("optimizer", False, 0.02, micro_batch=3)
    ]
    replay = replay_of(parts)
    merged = with_one_micro_batch({"forward": 0.8, "optimizer": 1.0}, 4)
    assert replay.step_s(merged) == pytest.approx(3 * 0.002 + 0.01 + 0.02)


def test_a_rank_with_half_a_processor_is_played_with_one():
    traces = [trace(0, LATE[0]), trace(1, LATE[1], processor=0.5)]
    replay = Replay(traces, threads=True)
    assert [replay.processor_share(rank) for rank in BOTH] == pytest.approx([1.0, 0.5])
    # Its transfers are done by threads too.
    assert replay.step_s(with_processors(replay)) == pytest.approx(0.05 + 0.005)
    assert replay.step_s(with_rank_as_others(replay, 1, 1.1)) == pytest.approx(0.05 + 0.005)
    # On a GPU the time of the thread says nothing.
    assert Replay(traces).processor_share(1) == pytest.approx(1.0)


def test_shares_are_exclusive_and_those_of_the_rank_that_waits_least():
    traces = [trace(rank, parts, host=0.2) for rank, parts in enumerate(LATE)]
    host = host_shares(traces, threads=False)
    assert host == pytest.approx({"forward": 0.0, "backward": 0.2, "optimizer": 0.0})
    shares = shares_of(Replay(traces), host, pipeline=False)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["late rank"] == pytest.approx(0.0, abs=1e-9)
    assert (shares[TRANSFER], shares["host"]) == pytest.approx((0.01 / 0.11, 0.02 / 0.11))


def test_the_host_of_a_short_part_is_little_of_the_step():
    own = trace(0, HEALTHY)
    own.work_s["optimizer"] = dict.fromkeys(own.work_s["optimizer"], 0.001 / 4)
    assert host_shares([own], threads=True)["optimizer"] == pytest.approx(0.8)
    assert host_share(own, threads=True) == pytest.approx(0.8 * 0.005 / 0.095)


def test_slower_than_calibrated_is_a_share_of_its_own_from_a_tenth_on():
    shares = {"products": 0.6, "attention": 0.0, "elementwise": 0.3, "optimizer": 0.0, "data": 0.1}
    assert slowed(shares, 1.05) == shares
    slow = slowed(shares, 1.5)
    assert (slow["products"], slow["slower than calibrated"]) == pytest.approx((0.4, 0.3))
    assert sum(slow.values()) == pytest.approx(1.0)


def test_a_disturbed_profiled_step_tells_only_its_count_of_operations():
    disturbed = trace(0, HEALTHY)
    disturbed.profiled = [mark._replace(processor_s=0.5 * mark.processor_s) for mark in disturbed.segments]
    disturbed.n_operations, disturbed.operation_s = 950, 1e-5
    assert host_shares([disturbed], threads=True) == pytest.approx(dict.fromkeys(COMPUTING, 0.1))
