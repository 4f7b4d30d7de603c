"""The moments at which a fault strikes, each seen in the files of the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from tools.soak.attempt import Attempt, last_row, newest_step
from tools.soak.work import EVAL_EVERY, STEPS

# Each moment waits for one thing in the run's folder.
WHAT = {
    "launch": "a random time after the launcher's start",
    "start": "a random time after the ranks' start",
    "step": "a random time after a random step",
    "eval": "the evaluation after a step",
    "save": "a folder of a checkpoint that is being written",
    "rename": "its manifest, just before it gets its name",
    "commit": "a new checkpoint, just after it got its name",
    "last": "the last checkpoint, before the run has its row",
}


class Moment(NamedTuple):
    """When a fault strikes: what to wait for, how many steps beyond the resumed one, and how many seconds more."""

    name: str
    steps: int
    delay_s: float

    @classmethod
    def draw(cls, random: Random, names: tuple[str, ...]) -> Moment:
        """Choose one of the moments `names`, a number of steps and a delay."""
        name = random.choice(names)
        longest_s = {"launch": 0.6, "start": 1.5, "step": 0.05, "commit": 0.02, "last": 0.01}.get(name, 0.0)
        return cls(name, random.randint(1, 8), random.uniform(0.0, longest_s))

    def wait(self, attempt: Attempt) -> bool:
        """Wait until the moment has come, and return False if the run ends before."""
        if self.name != "launch":
            came = attempt.wait_until(attempt.has_ranks) and attempt.wait_until(self._condition(attempt))
            if not came:
                return False
            if self.name in ("commit", "last"):
                attempt.look_for_manifest()
        time.sleep(self.delay_s)
        return attempt.process.poll() is None

    def _condition(self, attempt: Attempt) -> Callable[[], bool]:
        checkpoints = attempt.run / "checkpoints"
        if self.name == "step":
            return lambda: attempt.done_step() >= attempt.begun_at + self.steps
        if self.name == "eval":
            return lambda: evaluates(attempt)
        if self.name == "save":
            return lambda: attempt.done_step() > 0 and any(checkpoints.glob(".tmp-step-*"))
        if self.name == "rename":
            return lambda: attempt.done_step() > 0 and any(checkpoints.glob(".tmp-step-*/manifest.json"))
        if self.name == "commit":
            return lambda: newest_step(attempt.run) > attempt.begun_at
        if self.name == "last":
            return lambda: newest_step(attempt.run) == STEPS
        return lambda: True


def evaluates(attempt: Attempt) -> bool:
    """Return whether the step after which the run evaluates is done, and its evaluation is not."""
    step = attempt.done_step()
    return step > 0 and step % EVAL_EVERY == 0 and last_row(attempt.run / "eval.csv") < step
