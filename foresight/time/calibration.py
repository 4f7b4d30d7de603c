"""Find the seconds of operations from measured steps.

The logarithm of an operation's seconds is that of its curve (operations.py) plus a deviation of its shape. Deviations of near
shapes are alike: they have a prior covariance that falls with their distance. A measured step is a sum of operations on its
critical path, so the share of an operation in that path is how far the step follows it. Least squares of relative errors
(Gauss-Newton, with less weight for far-off rows) gives the rates and deviations together with their uncertainty, which says how
well a step of other operations is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gptscale.foresight.time.operations import amounts, coordinates
from gptscale.foresight.time.simulator import Contention, PlayedStep, play
from gptscale.foresight.time.work import BESIDE, Operation, StepWork

Array = Any
# How far a layer as a recipe holds it deviates from the curve of a plain one, as a logarithm.
HELD_SPREAD = 0.8
RateName = tuple[str, str]


class Prior(NamedTuple):
    """What is assumed of deviations of a kind, as logarithms.

    spread: of what near shapes share. near: how far apart in size shapes still share it. own: the spread of a shape alone.
    """

    spread: float
    near: float
    own: float


class MeasuredStep(NamedTuple):
    """A step and the seconds that it took. noise: the relative spread of repeated runs."""

    step: StepWork
    seconds: float
    noise: float = 0.01


class _Paths(NamedTuple):
    """Errors of measured steps, as logarithms, and how these steps follow the rates and deviations."""

    errors: Array
    jacobian: Array


@dataclass(frozen=True)
class _Problem:
    """Measured steps, and the operations and rates that they are made of."""

    rows: Sequence[MeasuredStep]
    operations: Sequence[Operation]
    amounts_of: Array
    n_rates: int

    def paths(self, x: Array) -> _Paths:
        """Play every step with the costs that `x` gives."""
        place = {operation: i for i, operation in enumerate(self.operations)}
        logs, slopes = _costs(x, self.amounts_of, self.n_rates)
        costs = dict(zip(self.operations, np.exp(logs), strict=True))
        shares, errors = np.zeros((len(self.rows), len(place))), np.zeros(len(self.rows))
        for i, row in enumerate(self.rows):
            timeline = play(row.step, costs.__getitem__)
            errors[i] = math.log(row.seconds / timeline.seconds)
            for operation, share in timeline.shares(costs.__getitem__).items():
                shares[i, place[operation]] = share
        return _Paths(errors, np.hstack([shares @ slopes, shares]))


@dataclass(frozen=True)
class Prediction:
    """The seconds of a step. spread: its relative standard deviation. grade: how its costs are known.

    unknown: the operation that adds most to the spread. far: one that is far from all that was measured of its kind, or "".
    """

    seconds: float
    spread: float
    grade: str
    unknown: str
    timeline: PlayedStep
    far: str = ""


CALIBRATED, OTHER_SIZE, DATA_SHEET = "calibrated here", "calibrated at another size", "data sheet"


# Operations that are a smaller share of a step do not decide how it is known.
SMALL = 0.01
# A shape is far from another if one of its figures is more than so many times the other's.
FAR = 4.0


class CostTable:
    """Seconds per operation, with their uncertainty and where they come from.

    logs: logarithms of the seconds. measured: operations that calibrated steps were made of. rates: seconds per unit, by rate.
    note: how the machine that was measured differs from that of the predicted run, said in the grade. contention: what
    computing and communicating at once costs, if it was measured.
    """

    note = ""
    contention: Contention | None = None

    def __init__(
        self,
        operations: Sequence[Operation],
        logs: Array,
        covariance: Array,
        measured: Iterable[Operation],
        rates: Mapping[RateName, float],
    ) -> None:
        self.places = {operation: i for i, operation in enumerate(operations)}
        self.logs, self.covariance, self.measured, self.rates = logs, covariance, set(measured), rates
        self._far: dict[Operation, bool] = {}

    def seconds(self, operation: Operation) -> float:
        """Return the seconds of an operation. Raises KeyError for one that was not prepared for."""
        return math.exp(self.logs[self.places[operation]])

    def predict(self, step: StepWork) -> Prediction:
        """Return the seconds of a step and how well they are known."""
        timeline = play(step, self.seconds, self.contention)
        share = timeline.shares(self.seconds)
        places = [self.places[op] for op in share]
        weights = np.array(list(share.values()))
        spread = math.sqrt(max(0.0, weights @ self.covariance[np.ix_(places, places)] @ weights))
        own = weights * np.sqrt(self.covariance[places, places])
        unknown = list(share)[int(own.argmax())]
        far = next((op for op, part in share.items() if part > SMALL and self._is_far(op)), None)
        return Prediction(
            timeline.seconds, spread, self._grade(share), _words(unknown), timeline, (far and _words(far)) or ""
        )

    def _grade(self, share: Mapping[Operation, float]) -> str:
        """Return how the costs are known that make up a step."""
        unmeasured = {op: part for op, part in share.items() if op not in self.measured}
        if not self.measured or sum(unmeasured.values()) <= SMALL:
            grade = CALIBRATED if self.measured else DATA_SHEET
        else:
            devices = {op.on for op in self.measured}
            sheets = {op.on for op, part in unmeasured.items() if part > SMALL and op.on not in devices}
            grade = f"{OTHER_SIZE}{''.join(f', {on} by data sheet' for on in sorted(sheets))}"
        return f"{grade} ({self.note})" if self.note and self.measured else grade

    def _is_far(self, operation: Operation) -> bool:
        """Return whether the kind was measured, but nothing of it whose figures differ by less than FAR times."""
        if operation not in self._far:
            alike = [op for op in self.measured if (op.kind, op.on) == (operation.kind, operation.on)]
            here = np.array(coordinates(operation))
            distances = [np.abs(here - coordinates(op)).max(initial=0) for op in alike]
            self._far[operation] = min(distances, default=0.0) > math.log(FAR)
        return self._far[operation]


def _words(operation: Operation) -> str:
    return f"{operation.kind} {tuple(operation.shape)}"


def calibrate(
    rows: Sequence[MeasuredStep],
    others: Iterable[Operation],
    rates: Mapping[RateName, tuple[float, float]],
    priors: Mapping[str, Prior],
    rounds: int = 25,
) -> CostTable:
    """Return the costs of the operations of `rows` and of `others` that explain the measured rows best.

    rates: of each (name, device or link) the seconds expected before any measurement, and the spread of their logarithm.
    """
    measured = {operation for row in rows for operation in row.step.operations()}
    operations = sorted(measured | set(others))
    names, amounts_of = _amounts(operations)
    expected = np.log([rates[name][0] for name in names])
    n_rates, n = len(names), len(operations)
    precision = np.zeros((n_rates + n, n_rates + n))
    precision[range(n_rates), range(n_rates)] = [rates[name][1] ** -2 for name in names]
    precision[n_rates:, n_rates:] = _prior_precision(operations, priors)
    x = np.concatenate([expected, np.zeros(n)])
    start = x.copy()
    noise = np.array([row.noise for row in rows])
    problem = _Problem(rows, operations, amounts_of, n_rates)
    path, damping = problem.paths(x), 1.0
    for round_ in range(rounds):
        # A row that is far off for reasons of its own pulls little. Which rows are, is known late.
        typical = float(np.median(np.abs(path.errors) / noise)) if rows else 0.0
        scale = noise * max(1.0, 1.5 * 0.85**round_ * typical)

        def loss(path: Any, x: Array, scale: Array = scale) -> float:
            rows_loss = 9 * _losses(path.errors / (3 * scale))[0].sum()
            return float(rows_loss + (x - start) @ precision @ (x - start))

        weights = scale**-2 * _losses(path.errors / (3 * scale))[1]
        curvature = precision + path.jacobian.T @ (weights[:, None] * path.jacobian)
        gradient = path.jacobian.T @ (weights * path.errors) - precision @ (x - start)
        while damping < 1e4:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            tried = problem.paths(x + step)
            if loss(tried, x + step) < loss(path, x):
                break
            damping *= 4
        else:
            break
        gain = 1 - loss(tried, x + step) / loss(path, x)
        x, path, damping = x + step, tried, max(damping / 4, 1e-3)
        if round_ > 12 and gain < 1e-3:
            break
    logs, slopes = _costs(x, amounts_of, n_rates)
    to_logs = np.hstack([slopes, np.eye(n)])
    covariance = to_logs @ np.linalg.solve(curvature, to_logs.T)
    return CostTable(operations, logs, covariance, measured, dict(zip(names, np.exp(x[:n_rates]), strict=True)))


def _losses(errors: Array) -> tuple[Array, Array]:
    """Return the losses of rows and their weights. Errors are in units beyond which a row is far off.

    What a model leaves out makes runs slower, not faster. So a slow row (error above 0) is soon left alone, and a fast one
    pulls on.
    """
    slow, square = errors > 0, errors**2
    root = np.sqrt(1 + square)
    return np.where(slow, np.log1p(square), 2 * (root - 1)), np.where(slow, 1 / (1 + square), 1 / root)


def _amounts(operations: Sequence[Operation]) -> tuple[list[RateName], Array]:
    """Return the rates that operations ask for, and how much of each each of them asks."""
    amounts_of = [{(name, op.on): amount for name, amount in amounts(op).items()} for op in operations]
    names = sorted({name for of_one in amounts_of for name in of_one})
    matrix = np.zeros((len(operations), len(names)))
    for i, of_one in enumerate(amounts_of):
        for name, amount in of_one.items():
            matrix[i, names.index(name)] = amount
    return names, matrix


def _costs(x: Array, amounts_of: Array, n_rates: int) -> tuple[Array, Array]:
    """Return the logarithms of all costs, and their slopes in the logarithms of the rates."""
    parts = amounts_of * np.exp(x[:n_rates])
    curve = parts.sum(axis=1)
    return np.log(curve) + x[n_rates:], parts / curve[:, None]


def _prior_precision(operations: Sequence[Operation], priors: Mapping[str, Prior]) -> Array:
    """Return the inverse of the deviations' prior covariance. Shapes of different kinds or devices are independent."""
    precision = np.zeros((len(operations), len(operations)))
    families: dict[tuple[str, str], list[int]] = {}
    for i, operation in enumerate(operations):
        families.setdefault((operation.kind, operation.on), []).append(i)
    for (kind, _), members in families.items():
        recipe, _, what = kind.removeprefix(BESIDE).rpartition(": ")
        # No data sheet says what a recipe adds to a layer.
        prior = priors[what]._replace(spread=HELD_SPREAD) if recipe else priors[what]
        points = np.array([coordinates(operations[i]) for i in members]).reshape(len(members), -1)
        distance = ((points[:, None] - points[None]) ** 2).sum(axis=-1) / prior.near**2
        covariance = prior.spread**2 * np.exp(-distance / 2) + prior.own**2 * np.eye(len(members))
        precision[np.ix_(members, members)] = np.linalg.inv(covariance)
    return precision
