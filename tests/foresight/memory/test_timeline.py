"""A log of allocations, read: what lived when, and whose it was."""

import numpy as np
import pytest

from gptscale.foresight.memory.timeline import read_timeline
from gptscale.foresight.mock_cuda.watch import BACKWARD, BUILD, FORWARD, GRADIENT, OPTIMIZER, PARAMETER

PLACES = [(BUILD, ""), (FORWARD, "blocks.3.mlp.fc"), (BACKWARD, ""), (OPTIMIZER, ""), (FORWARD, "loss"), (FORWARD, "")]


def timeline_of(*events, labels=(), marks=(), steps=()):
    """The timeline of events (address, bytes, place)."""
    owners = {"places": PLACES, "labels": list(labels), "marks": list(marks), "steps": list(steps)}
    return read_timeline(np.array(events, dtype=np.int64).reshape(-1, 3), owners)


def test_what_lives_after_each_event_and_its_peak():
    timeline = timeline_of((1, 100, 0), (2, 50, 1), (1, -100, 1), (3, 70, 2))
    assert timeline.total.tolist() == [100, 150, 50, 120]
    assert (timeline.peak, timeline.peak_at) == (150, 1)


def test_without_a_label_the_place_says_whose_it_is():
    timeline = timeline_of(*((i + 1, 10, i) for i in range(len(PLACES))))
    assert list(timeline.by_owner(5)) == [
        "while the engine is built",
        "activation of blocks.*.mlp.fc",
        "under way in backward",
        "under way in the optimizer",
        "logits and loss",
        "other",
    ]


@pytest.mark.parametrize(
    ("labels", "owner"),
    [
        # The label that is surest counts, whenever it was noted.
        ([(1, 1, GRADIENT), (1, 1, PARAMETER)], PARAMETER),
        ([(1, 1, PARAMETER), (1, 1, GRADIENT)], PARAMETER),
        ([(1, 1, "bucket"), (1, 1, GRADIENT)], GRADIENT),
        ([(1, 1, GRADIENT), (1, 1, "bucket")], GRADIENT),
        # Noted when another allocation lay there.
        ([(0, 1, GRADIENT)], "under way in backward"),
        # After the last event.
        ([(2, 1, "bucket")], "bucket"),
    ],
)
def test_a_label_belongs_to_what_lies_there_when_it_is_noted(labels, owner):
    timeline = timeline_of((1, 10, 2), (2, 5, 0), labels=labels)
    assert timeline.by_owner(1)[owner] == 10


def test_curves_of_all_kinds_sum_to_the_total():
    timeline = timeline_of((1, 100, 1), (2, 50, 4), (3, 20, 1), (1, -100, 2))
    curves = timeline.curves(1)
    told = {kind: curve.tolist() for kind, curve in curves.items()}
    assert told == {"activation": [100, 120, 20], "logits and loss": [50, 50, 50]}
    assert sum(curves.values()).tolist() == timeline.total[1:4].tolist()
