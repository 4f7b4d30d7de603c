"""Two recordings laid beside each other, value by value: how far each is apart, and what that may be by rounding.

A gradient may deviate by the tolerance of its largest element, and of a hundredth of the largest of all weights: so one whose true
value is zero is not wrong for its rounding, and one that is small is not right for being small. An update may deviate as far as
its gradients may, for an optimizer such as Adam turns the rounding of a gradient that is almost zero into a whole step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gptscale.foresight.prove.program import Recording

Array = np.ndarray[Any, Any]
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# What two correct programs in lower precision differ by: their sums have some thirty roundings (docs/measurements/LOG.md).
TOLERANCES = {"float64": 1e-5, "float32": 1e-5, "float16": 2e-2, "bfloat16": 6e-2}
SMALL = 0.01
BEFORE, GRADIENT, NORM, WEIGHT, START = "before clipping", "gradient", "norm", "weight", "start"


@dataclass(frozen=True)
class Piece:
    """What one tensor of one rank holds of a weight. copy: tensors of one rank have different ones."""

    rank: int
    copy: int
    where: dict[str, Any]
    values: Array

    def put(self, whole: Array, values: Array) -> None:
        """Write values of this part into a whole."""
        whole.reshape(-1)[self.places(whole.shape)] = values.reshape(-1)

    def places(self, size: tuple[int, ...]) -> Array:
        """Return where its elements lie in the flattened whole."""
        everywhere = np.arange(math.prod(size)).reshape(size)
        if "flat" in self.where:
            start, length = self.where["flat"]
            return everywhere.reshape(-1)[start : start + length]
        if "rows" in self.where:
            dimension, rows = self.where["rows"]
            return everywhere.take(rows, dimension).reshape(-1)
        return everywhere[tuple(slice(start, start + length) for start, length in self.where["box"])].reshape(-1)


class Whole:
    """A value of all ranks together.

    values: of the last rank that has each element. apart: the largest difference between ranks that hold the same.
    """

    def __init__(self, pieces: list[Piece], size: tuple[int, ...]) -> None:
        self.pieces, self.size = pieces, size
        self.values, self.apart = np.zeros(size), 0.0
        self.held = np.zeros(math.prod(size), dtype=bool)
        flat = self.values.reshape(-1)
        for piece in pieces:
            places = piece.places(size)
            known = self.held[places]
            if known.any():
                difference = np.abs(flat[places] - piece.values.reshape(-1))[known].max()
                self.apart = max(self.apart, math.inf if math.isnan(difference) else float(difference))
            flat[places] = piece.values.reshape(-1)
            self.held[places] = True

    @property
    def versions(self) -> list[Array]:
        """Return the value as each rank has it that has all of it."""
        return [piece.values.reshape(self.size) for piece in self.pieces if piece.values.size == self.values.size]


@dataclass(frozen=True)
class Difference:
    """One value that is unlike: its kind, weight and step, how far it is apart, and both sides of it.

    others: how many of the weights of this kind and step are unlike, of how many.
    """

    kind: str
    name: str
    step: int
    deviation: float
    expected: Any
    actual: Any
    others: tuple[int, int] = (1, 1)


class Comparison:
    """A candidate against a reference. worst: the largest deviation of each kind, where 1 is what the tolerance allows."""

    def __init__(self, reference: Recording, candidate: Recording, steps: int, tolerance: float | None) -> None:
        self.reference, self.candidate, self.steps = reference, candidate, steps
        starts = reference.by_kind[START]
        self.line = {fact["name"]: fact["line"] for fact in starts}
        self.tied = {fact["name"]: fact["tied"] or fact["name"] for fact in starts}
        facts = [*starts, *candidate.by_kind[GRADIENT], *candidate.by_kind["autocast"], *reference.by_kind["autocast"]]
        precisions = [fact["dtype"] for fact in facts if "dtype" in fact]
        self.precision = max(precisions, key=lambda name: EPSILON[name], default="float32")
        self.tolerance = tolerance or TOLERANCES[self.precision]
        self.worst: dict[str, float] = {}
        self.differences = list(self._differences())

    @cached_property
    def kinds(self) -> list[str]:
        """Return the kinds of values that both have noted for each weight, in the order of a step."""
        moments = sorted(kind for kind in self.reference.by_kind if kind.startswith("moment "))
        both = [kind for kind in (BEFORE, NORM, GRADIENT, *moments, WEIGHT) if self.reference.by_kind[kind]]
        return [kind for kind in both if self.candidate.by_kind[kind]]

    def wholes(self, recording: Recording, kind: str, step: int) -> dict[str, Whole]:
        """Return the values of a kind at a step, by the names of the reference's weights."""
        facts: dict[str, dict[Any, dict[str, Any]]] = defaultdict(dict)
        for fact in recording.by_kind[kind]:
            if fact.get("step", 0) == step:
                name = self.tied.get(fact["name"], fact["name"])
                facts[name][fact["rank"], fact["copy"], str(fact["where"])] = fact
        return {
            name: Whole(
                [Piece(f["rank"], f["copy"], f["where"], recording.array(f)) for f in of.values()],
                tuple(next(iter(of.values()))["size"]),
            )
            for name, of in facts.items()
        }

    def norms(self, recording: Recording, step: int) -> dict[int, float]:
        """Return the norm that each rank clipped by at a step."""
        return {fact["rank"]: fact["value"] for fact in recording.by_kind[NORM] if fact["step"] == step}

    def losses(self, recording: Recording, step: int) -> dict[int, float]:
        """Return the loss of each rank at a step, summed over its backward passes."""
        sums: dict[int, float] = defaultdict(float)
        for fact in recording.by_kind["loss"]:
            if fact["step"] == step:
                sums[fact["rank"]] += fact["value"]
        return dict(sums)

    def loss_deviation(self, step: int) -> float:
        """Return how far the mean of the ranks' losses, or their sum, is from the reference's."""
        expected = sum(self.losses(self.reference, step).values())
        losses = [*self.losses(self.candidate, step).values()]
        either = (sum(losses) / len(losses), sum(losses)) if losses else (expected,)
        return min(abs(value - expected) for value in either) / max(abs(expected), 1e-30)

    def _differences(self) -> Iterator[Difference]:
        starts = self.wholes(self.candidate, START, 0)
        apart = [(name, whole) for name, whole in starts.items() if whole.apart > 0 and name in self.tied]
        if apart:
            name, whole = apart[0]
            yield Difference("weight at the start", name, 0, whole.apart, None, whole, (len(apart), len(starts)))
        for step in range(1, self.steps + 1):
            self._keep("loss", self.loss_deviation(step))
            for kind in self.kinds:
                found = [*(self._norm(step) if kind == NORM else self._tensors(kind, step))]
                total = 1 if kind == NORM else len(self.wholes(self.reference, kind, step))
                if found:
                    # The first, unless another is not there at all: that one tells more.
                    first = next(
                        (d for d in found if isinstance(d.actual, Whole) and not d.actual.values.any()), found[0]
                    )
                    yield Difference(
                        kind, first.name, step, first.deviation, first.expected, first.actual, (len(found), total)
                    )

    def _keep(self, kind: str, deviation: float) -> None:
        deviation = math.inf if math.isnan(deviation) else deviation
        self.worst[kind] = max(self.worst.get(kind, 0.0), deviation)

    def _norm(self, step: int) -> Iterator[Difference]:
        expected, actual = self.norms(self.reference, step), self.norms(self.candidate, step)
        if not expected or not actual:
            return
        true = expected[0]
        far = max(abs(value - true) / max(abs(true), 1e-30) for value in actual.values())
        self._keep(NORM, far)
        if not far <= self.tolerance:
            yield Difference(NORM, "", step, far, true, actual)

    def _tensors(self, kind: str, step: int) -> Iterator[Difference]:
        expected, actual = (self.wholes(each, kind, step) for each in (self.reference, self.candidate))
        largest = max((np.abs(whole.values).max(initial=0.0) for whole in expected.values()), default=0.0)
        for name, true in expected.items():
            if name not in actual:
                yield Difference(kind, name, step, 1.0, true, None)
                continue
            own = actual[name]
            if kind == WEIGHT:
                scale = self.update_scale(name, step, true)
            else:
                scale = np.asarray(np.abs(true.values).max(initial=0.0) + SMALL * largest)
                # The square of a gradient deviates by twice as much.
                scale = scale * (1 + kind.endswith("_sq"))
            if scale.size == 1 and not scale:
                scale = np.ones(())
            far = float((np.abs(own.values - true.values) / scale).max(initial=0.0))
            apart = own.apart / float(scale.min())
            self._keep("update" if kind == WEIGHT else kind, far)
            self._keep("between ranks", apart)
            if not max(far, apart) <= self.tolerance:
                yield Difference(kind, name, step, max(far, apart), true, own)

    def update_scale(self, name: str, step: int, true: Whole) -> Array:
        """Return for each element of a weight by what its deviation is divided: its update, and what rounding may make of it."""
        update, least = 0.0, np.full(true.size, np.inf)
        floor = np.full(true.size, 0.0)
        before = self.wholes(self.reference, START, 0)[name].values
        for number in range(1, step + 1):
            after = self.wholes(self.reference, WEIGHT, number)[name].values
            update += float(np.abs(after - before).max(initial=0.0))
            before = after
            gradients = self.wholes(self.reference, GRADIENT, number)
            if name in gradients:
                largest = max(float(np.abs(whole.values).max(initial=0.0)) for whole in gradients.values())
                own = np.abs(gradients[name].values)
                allowed = self.tolerance * (own.max(initial=0.0) + SMALL * largest)
                least = np.minimum(least, own / max(allowed, 1e-300))
        precision = max(
            (f["dtype"] for f in self.reference.by_kind[WEIGHT] if f["name"] == name), key=lambda n: EPSILON[n]
        )
        floor = 4 * step * EPSILON[precision] * (np.abs(true.values).max(initial=0.0) + 1e-30)
        return np.asarray((10 * update * np.minimum(1.0, 1 / np.maximum(least, 1e-30)) + floor) / self.tolerance)
