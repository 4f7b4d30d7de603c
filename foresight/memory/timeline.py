"""What lived when, and whose it was: the log that a simulated program leaves, read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gptscale.foresight.mock_cuda.watch import BACKWARD, BUILD, FORWARD, GRADIENT, OPTIMIZER, PARAMETER, STATE

LOGITS = "logits and loss"
ACTIVATION, UNDER_WAY, STEPPING, OTHER = "activation", "under way in backward", "under way in the optimizer", "other"
# Memory allocated while the engine is built that is no parameter in the end: weights before they are split.
BUILDING = "while the engine is built"
# Every label, the surest first: an allocation with two labels is the first of them.
ORDER = (PARAMETER, STATE, GRADIENT)
# A module of the head by its name, or by its class in a recipe that has none of our names.
BLOCK_NUMBER = re.compile(r"\.\d+\b")
HEAD = re.compile(r"(^|\.)(loss|lm_head)$|CrossEntropy")


@dataclass(frozen=True)
class Timeline:
    """The memory of one process from before its engine was built to the end of its last step.

    born, died, nbytes, owner: of each allocation, when it was made and freed, its bytes, and whose it is. times: events in all,
    by which time is counted. marks: (time, part) where a part begins. steps: the time when each step begins.
    """

    born: np.ndarray
    died: np.ndarray
    nbytes: np.ndarray
    owner: Sequence[str]
    times: int
    marks: list[tuple[int, str]]
    steps: list[int]

    @cached_property
    def total(self) -> np.ndarray:
        """Return the bytes that live after each event."""
        return self._living(np.ones(len(self.born), dtype=bool))

    def _living(self, chosen: np.ndarray) -> np.ndarray:
        """Return the bytes of some of the allocations that live after each event."""
        change = np.zeros(self.times + 1, dtype=np.int64)
        np.add.at(change, self.born[chosen], self.nbytes[chosen])
        np.add.at(change, self.died[chosen], -self.nbytes[chosen])
        return np.cumsum(change[: self.times])

    @property
    def peak_at(self) -> int:
        return int(np.argmax(self.total)) if self.times else 0

    @property
    def peak(self) -> int:
        return int(self.total.max(initial=0))

    def by_owner(self, time: int) -> dict[str, int]:
        """Return the bytes that lived at `time` by their owner, the largest first."""
        nbytes = Counter[str]()
        for i in np.flatnonzero((self.born <= time) & (self.died > time)).tolist():
            nbytes[self.owner[i]] += int(self.nbytes[i])
        return dict(nbytes.most_common())

    def part_at(self, time: int) -> str:
        return next((part for begin, part in reversed(self.marks) if begin <= time), BUILD)

    def curves(self, begin: int) -> dict[str, np.ndarray]:
        """Return the bytes after each event from a time on, for each kind of owner."""
        kinds = np.array([kind_of(owner) for owner in self.owner])
        return {kind: self._living(kinds == kind)[begin:] for kind in dict.fromkeys(kinds.tolist())}


def kind_of(owner: str) -> str:
    """Return an owner without the module, so that all activations are one kind."""
    return owner.partition(" of ")[0]


def read_timeline(log: np.ndarray, owners: Mapping[str, Any]) -> Timeline:
    """Return the timeline of a log, an array of (address, signed bytes, number of the place).

    owners: places, labels, marks and steps, as foresight/mock_cuda/watch.py has them.
    """
    live: dict[int, int] = {}
    born: list[int] = []
    died: list[int] = []
    label_of: list[str] = []
    # In the order of their times.
    labels, i = owners["labels"], 0
    for time, (address, nbytes, _) in enumerate(log.tolist()):
        while i < len(labels) and labels[i][0] <= time:
            _set_label(live, label_of, labels[i])
            i += 1
        if nbytes > 0:
            live[address] = len(born)
            born.append(time)
            died.append(len(log))
            label_of.append("")
        elif address in live:
            died[live.pop(address)] = time
    for label in labels[i:]:
        _set_label(live, label_of, label)
    times, ends = np.array(born, dtype=np.int64), np.array(died, dtype=np.int64)
    places = [owners["places"][place] for place in log[times, 2].tolist()]
    owner = [label or _owner(*place) for label, place in zip(label_of, places, strict=True)]
    marks = [(time, part) for time, part in owners["marks"]]
    return Timeline(times, ends, log[times, 1], owner, len(log), marks, list(owners["steps"]))


def _set_label(live: dict[int, int], label_of: list[str], timed_label: tuple[int, int, str]) -> None:
    """Label the allocation that lies at an address, unless it has a surer label."""
    _, address, label = timed_label
    if address in live:
        before = label_of[live[address]]
        if before not in ORDER or (label in ORDER and ORDER.index(label) < ORDER.index(before)):
            label_of[live[address]] = label


def _owner(part: str, module: str) -> str:
    """Return the owner of an allocation that nobody recognised, from where it was made."""
    if HEAD.search(module):
        return LOGITS
    if part == BUILD:
        return BUILDING
    if part == OPTIMIZER:
        return STEPPING
    if part == BACKWARD and not module:
        return UNDER_WAY
    if part in (FORWARD, BACKWARD) and module:
        return f"{ACTIVATION} of {BLOCK_NUMBER.sub('.*', module)}"
    return OTHER
