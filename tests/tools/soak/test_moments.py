"""The moments of a soak's faults, as the files of a run show them."""

from random import Random
from types import SimpleNamespace

import pytest

from tools.soak.faults import ANY, LATER
from tools.soak.moments import WHAT, Moment, evaluates
from tools.soak.work import EVAL_EVERY, STEPS


def attempt(run, done_step, begun_at=4):
    return SimpleNamespace(run=run, begun_at=begun_at, done_step=lambda: done_step)


def test_every_moment_is_drawn_and_the_seed_fixes_it():
    names = ("launch", "last", *ANY)
    assert {Moment.draw(Random(i), names).name for i in range(100)} == set(WHAT)
    assert Moment.draw(Random(1), LATER) == Moment.draw(Random(1), LATER)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("save", ".tmp-step-8-ab"),
        ("rename", ".tmp-step-8-ab/manifest.json"),
        ("commit", "step-8/manifest.json"),
        ("last", f"step-{STEPS}/x"),
    ],
)
def test_a_save_is_seen_by_its_files(name, file, tmp_path):
    has_come = Moment(name, 1, 0.0)._condition(attempt(tmp_path, 8))
    assert not has_come()
    (tmp_path / "checkpoints" / file).parent.mkdir(parents=True)
    (tmp_path / "checkpoints" / file).touch()
    assert has_come()


def test_a_step_is_counted_from_where_the_run_went_on(tmp_path):
    assert not Moment("step", 3, 0.0)._condition(attempt(tmp_path, 6))()
    assert Moment("step", 3, 0.0)._condition(attempt(tmp_path, 7))()


def test_an_evaluation_lasts_until_its_row(tmp_path):
    assert not evaluates(attempt(tmp_path, EVAL_EVERY + 1))
    assert evaluates(attempt(tmp_path, 2 * EVAL_EVERY))
    (tmp_path / "eval.csv").write_text(f"step,loss\n{2 * EVAL_EVERY},2.5\n")
    assert not evaluates(attempt(tmp_path, 2 * EVAL_EVERY))
