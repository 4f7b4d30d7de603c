"""Two recordings laid beside each other, value by value: how far each is apart, and what that may be by rounding.

A gradient may deviate by the tolerance of its largest element, and of a hundredth of the largest of all weights. So one whose
true value is zero is not wrong for its rounding, and one that is small is not right for being small. An update may deviate as far
as its gradients may: an optimizer such as Adam turns the rounding of a gradient that is almost zero into a whole step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from gptscale.foresight.prove.program import Recording

Array = np.ndarray[Any, Any]
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# Between two correct programs. In lower precision the sums of both have some thirty roundings (docs/measurements/LOG.md).
TOLERANCES = {"float64": 1e-5, "float32": 1e-5, "float16": 2e-2, "bfloat16": 6e-2}
SMALL = 0.01
# Adam turns a gradient of mere rounding into a whole step. So from step 2 on the gradients of right programs are further apart.
LATER = 10.0
START, BEFORE, NORM, GRADIENT, WEIGHT = "start", "before clipping", "norm", "gradient", "weight"


@dataclass(frozen=True)
class HeldPart:
    """What one tensor of one rank holds of a weight, and where (Part of parts.py)."""

    rank: int
    where: Mapping[str, Any]
    values: Array

    def within(self, whole: Array) -> tuple[Array, Any]:
        """Return a view of a whole, and the index of this part in the view."""
        if "flat" in self.where:
            start, length = self.where["flat"]
            return whole.reshape(-1), slice(start, start + length)
        if "rows" in self.where:
            dimension, rows = self.where["rows"]
            return whole, (*dimension * [slice(None)], rows)
        return whole, tuple(slice(start, start + length) for start, length in self.where["box"])


class Whole:
    """A value of all ranks together. apart: the largest difference between ranks that hold the same element."""

    def __init__(self, pieces: list[HeldPart], size: tuple[int, ...]) -> None:
        self.pieces, self.size, self.apart = pieces, size, 0.0
        self.values, held = np.zeros(size), np.zeros(size, dtype=bool)
        for piece in pieces:
            (into, index), (known, _) = piece.within(self.values), piece.within(held)
            before = np.asarray(known[index])
            values = piece.values.reshape(before.shape)
            if before.any():
                difference = np.abs(into[index] - values)[before].max(initial=0.0)
                self.apart = max(self.apart, math.inf if math.isnan(difference) else float(difference))
            into[index], known[index] = values, True

    @property
    def largest(self) -> float:
        return float(np.abs(self.values).max(initial=0.0))

    @property
    def versions(self) -> list[Array]:
        """Return the value as each tensor has it that holds all of it."""
        return [piece.values.reshape(self.size) for piece in self.pieces if piece.values.size == self.values.size]


class Wholes(Mapping[str, Whole]):
    """The values of a kind at a step, by the names of weights, each read when it is asked for: together they may be too many."""

    def __init__(self, recording: Recording, facts: Mapping[str, list[dict[str, Any]]]) -> None:
        self._recording, self._facts = recording, facts
        self._made = lru_cache(2)(self._make)

    def __getitem__(self, name: str) -> Whole:
        return self._made(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def _make(self, name: str) -> Whole:
        facts = self._facts[name]
        pieces = [HeldPart(fact["rank"], fact["where"], self._recording.array(fact)) for fact in facts]
        return Whole(pieces, tuple(facts[0]["size"]))

    @cached_property
    def largest(self) -> float:
        return float(np.max([whole.largest for whole in self.values()], initial=0.0))


@dataclass(frozen=True)
class Difference:
    """The first value of a kind and step that is wrong, both sides of it, and how many weights are wrong, of how many."""

    kind: str
    name: str
    step: int
    deviation: float
    expected: Any
    actual: Any
    unlike: int = 1
    of: int = 1


class Proof:
    """A candidate against a reference.

    differences: what is wrong, in the order in which a step computes. worst: the largest relative deviation of each kind.
    """

    def __init__(self, reference: Recording, candidate: Recording, steps: int, tolerance: float | None) -> None:
        self.reference, self.candidate, self.steps = reference, candidate, steps
        starts = reference.by_kind[START]
        self.line = {fact["name"]: fact["line"] for fact in starts}
        self.tied = {fact["name"]: fact["tied"] or fact["name"] for fact in starts}
        facts = [*starts, *candidate.by_kind[GRADIENT], *candidate.by_kind["autocast"], *reference.by_kind["autocast"]]
        self.precision = max((f["dtype"] for f in facts if "dtype" in f), key=lambda name: EPSILON.get(name, 0.0))
        self.tolerance = tolerance or TOLERANCES[self.precision]
        moments = sorted(kind for kind in reference.by_kind if kind.startswith("moment "))
        kinds = (BEFORE, NORM, GRADIENT, *moments, WEIGHT)
        self.kinds = [kind for kind in kinds if reference.by_kind[kind] and candidate.by_kind[kind]]
        # A stage may hold weights that only other stages use: they never have a gradient there.
        gradients = candidate.by_kind[GRADIENT]
        used = {(fact["rank"], fact["copy"]) for fact in gradients if not fact["none"]}
        names = {fact["name"] for fact in gradients if not fact["none"]}
        self.unused = {(fact["rank"], fact["copy"]) for fact in gradients if fact["name"] in names} - used
        # A sum of millions of squares, one after another, rounds by more than the tolerance, and so does what is clipped by it.
        count = sum(math.prod(fact["size"]) for fact in starts) if reference.by_kind[NORM] else 0
        self.norm_rounding = EPSILON.get(self.precision, 0.0) * math.sqrt(count) / 4
        self.worst: dict[str, float] = {}
        self.exchanged_in_step = False
        self.wholes = lru_cache(64)(self._wholes)
        self.differences = list(self._differences())

    def _wholes(self, recording: Recording, kind: str, step: int) -> Wholes:
        """Return the values of a kind at a step, by the names of the reference's weights."""
        facts: dict[str, dict[Any, dict[str, Any]]] = defaultdict(dict)
        for fact in recording.by_kind[kind]:
            unused = recording is self.candidate and (fact["rank"], fact["copy"]) in self.unused
            if fact.get("step", 0) == step and not unused:
                facts[self.tied.get(fact["name"], fact["name"])][fact["rank"], fact["copy"], str(fact["where"])] = fact
        return Wholes(recording, {name: [*of.values()] for name, of in facts.items()})

    def losses(self, recording: Recording, step: int) -> dict[int, float]:
        """Return the loss of each rank at a step, summed over its backward passes."""
        sums: dict[int, float] = defaultdict(float)
        for fact in recording.by_kind["loss"]:
            sums[fact["rank"]] += fact["value"] if fact["step"] == step else 0.0
        return dict(sums)

    def loss_deviation(self, step: int) -> float:
        """Return how far the mean of the ranks' losses, or their sum, is from the reference's."""
        expected, losses = sum(self.losses(self.reference, step).values()), self.losses(self.candidate, step)
        total = sum(losses.values())
        either = (total, total / len(losses)) if losses else (expected,)
        return min(abs(value - expected) for value in either) / max(abs(expected), 1e-30)

    def _differences(self) -> Iterator[Difference]:
        starts = self.wholes(self.candidate, START, 0)
        apart = [name for name, whole in starts.items() if whole.apart > 0 and name in self.tied]
        for name in apart[:1]:
            yield Difference(START, name, 0, starts[name].apart, None, starts[name], len(apart), len(starts))
        for step in range(1, self.steps + 1):
            self._is_right("loss", self.loss_deviation(step), 1)
            for kind in self.kinds:
                worst = dict(self.worst)
                found = [*(self._norm(step) if kind == NORM else self._tensors(kind, step))]
                if kind == GRADIENT and found and self._is_exchanged_later(found, step):
                    self.worst, self.exchanged_in_step, found = worst, True, []
                # The first, unless the gradient of another is gone: that one tells more.
                gone = (d for d in found if isinstance(d.actual, Whole) and not d.actual.largest)
                if (first := next(gone, found[0] if found else None)) is not None:
                    of = 1 if kind == NORM else len(self.wholes(self.reference, kind, step))
                    yield replace(first, unlike=len(found), of=of)

    def _is_exchanged_later(self, found: list[Difference], step: int) -> bool:
        """Return whether the optimizer itself averages gradients: their mean over ranks is right, and so are its updates."""
        for d in found:
            if d.actual is None or len(d.actual.versions) != self.candidate.world:
                return False
            apart = np.abs(np.mean(d.actual.versions, axis=0) - d.expected.values).max(initial=0.0)
            if apart > LATER * self.tolerance * d.expected.largest + 1e-30:
                return False
        return not any(self._tensors(WEIGHT, step))

    def _is_right(self, kind: str, deviation: float, step: int) -> bool:
        self.worst[kind] = max(self.worst.get(kind, 0.0), math.inf if math.isnan(deviation) else deviation)
        rounding = 0.0 if kind in ("loss", BEFORE, "between ranks") else self.norm_rounding
        return deviation <= max(self.tolerance * (LATER if step > 1 else 1.0), rounding)

    def _norm(self, step: int) -> Iterator[Difference]:
        both = (self.reference, self.candidate)
        norms = [{f["rank"]: f["value"] for f in each.by_kind[NORM] if f["step"] == step} for each in both]
        for true in norms[0].values() if norms[1] else ():
            far = max(abs(value - true) for value in norms[1].values()) / max(abs(true), 1e-30)
            if not self._is_right(NORM, far, step):
                yield Difference(NORM, "", step, far, true, norms[1])

    def _tensors(self, kind: str, step: int) -> Iterator[Difference]:
        expected, actual = (self.wholes(each, kind, step) for each in (self.reference, self.candidate))
        for name, true in expected.items():
            if (own := actual.get(name)) is None:
                if kind.startswith("moment "):
                    # Its optimizer keeps this one in parts of its own.
                    continue
                yield Difference(kind, name, step, math.inf, true, None)
                continue
            # The square of a gradient deviates by twice as much.
            scale = np.asarray((true.largest + SMALL * expected.largest) * (1 + kind.endswith("_sq")) or 1.0)
            if kind == WEIGHT:
                scale = self._update_scale(name, step, true)
            far = float((np.abs(own.values - true.values) / scale).max(initial=0.0))
            apart = own.apart / float(scale.min())
            own_kind, at = ("update", 1) if kind == WEIGHT else (kind, step)
            right = [self._is_right(own_kind, far, at), self._is_right("between ranks", apart, 1)]
            if not all(right):
                yield Difference(kind, name, step, max(far, apart), true, own)

    def _update_scale(self, name: str, step: int, true: Whole) -> Array:
        """Return what the deviation of each element of a weight is divided by: its updates so far, and its own rounding.

        An update deviates by the share by which its gradient may, times ten for the sake of the moments.
        """
        share, updates = np.zeros(true.size), 0.0
        before = self.wholes(self.reference, START, 0)[name].values
        for number in range(1, step + 1):
            after = self.wholes(self.reference, WEIGHT, number)[name].values
            updates += float(np.abs(after - before).max(initial=0.0))
            before = after
            gradients = self.wholes(self.reference, GRADIENT, number)
            if name in gradients:
                allowed = gradients[name].largest + SMALL * gradients.largest
                with np.errstate(divide="ignore", invalid="ignore"):
                    share = np.fmax(share, allowed / np.abs(gradients[name].values))
        dtypes = {fact["dtype"] for fact in self.reference.by_kind[WEIGHT] if fact["name"] == name}
        rounding = 4 * step * max(EPSILON.get(dtype, 0.0) for dtype in dtypes) * true.largest
        return np.asarray(10 * updates * np.minimum(share, 1 / self.tolerance) + rounding / self.tolerance + 1e-30)
