"""How a value is unlike the reference's, and what therefore is likely wrong.

A factor tells much: 2 or n or 1/n say that a reduction happened twice, as a sum, or once too often. So does what the ranks hold:
if their mean is right, nobody took it.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gptscale.foresight.prove.compare import BEFORE, GRADIENT, NORM, START, WEIGHT, Array, Difference, Proof, Whole

# Patterns are seen through the rounding of either side.
ALIKE = 2e-3
_ROWS = csv.DictReader(Path(__file__).with_name("causes.csv").read_text().splitlines())
CAUSES = {row["cause"]: row["advice"] for row in _ROWS}
# The short name of a cause, and what was seen.
Finding = tuple[str, str]


def alike(one: Array, other: Array, precision: float = ALIKE, rounding: float = 1e-30) -> bool:
    """Return whether two arrays are equal but for some rounding."""
    return bool(np.abs(one - other).max(initial=0.0) <= precision * np.abs(other).max(initial=0.0) + rounding)


def factor(own: Array, true: Array, rounding: float = 1e-30) -> float | None:
    """Return k if an array is k times another one."""
    square = float((true * true).sum())
    k = float((own * true).sum()) / square if square else 0.0
    return k if math.isfinite(k) and alike(own, k * true, rounding=rounding) else None


def words(k: float, world: int) -> str:
    """Return a factor in words."""
    ranks = {float(world): "the number of ranks", world**0.5: "the root of the number of ranks"}
    ranks |= {1 / value: f"one over {name}" for value, name in ranks.items()}
    name = next((f", {name}" for value, name in ranks.items() if abs(k / value - 1) < ALIKE), "")
    return f"times {k:.4g}{name}" if k else "zero"


def finding(comparison: Proof, difference: Difference) -> Finding:
    """Return the likely cause of the first difference, and how it looks."""
    c, d = comparison, difference
    if d.kind == START:
        return "no broadcast", "unlike between ranks"
    if d.kind == NORM:
        return _norm(c, d)
    if d.actual is None:
        return ("norm omits", "left out of clipping") if d.kind == BEFORE else ("not held", "missing")
    causes = _gradient if d.kind in (BEFORE, GRADIENT) else _update
    return next(causes(c, d, d.actual, d.expected))


def _norm(c: Proof, d: Difference) -> Finding:
    values, true, root = [*d.actual.values()], d.expected, math.sqrt(c.candidate.world)
    if max(values) - min(values) > c.tolerance * abs(true):
        each = ", ".join(f"{value:.4g}" for value in values)
        return "norm of a shard", f"unlike between ranks: {each}, not {true:.4g}"
    k = values[0] / true if true else math.inf
    how = f"{words(k, c.candidate.world)}: {values[0]:.4g}, not {true:.4g}"
    if min(abs(k / root - 1), abs(k * root - 1)) < ALIKE:
        return "norm by root", how
    return "norm omits" if k < 1 else "norm doubles", how


def _gradient(c: Proof, d: Difference, own: Whole, true: Whole) -> Iterator[Finding]:
    world, versions = c.candidate.world, own.versions
    samples, tied = _samples(c, d.step), [*c.tied.values()].count(d.name) > 1 and d.unlike < d.of
    if d.kind == GRADIENT and BEFORE in c.kinds:
        yield "clipped otherwise", "right before clipping, wrong after it"
    raw = c.wholes(c.reference, BEFORE, d.step).get(d.name)
    if d.kind == GRADIENT and raw and not c.candidate.by_kind[NORM] and alike(own.values, raw.values):
        yield "not clipped", "as it is before clipping"
    if not all(alike(value, versions[0]) for value in versions):
        for total, what in ((np.mean(versions, axis=0), "mean"), (np.sum(versions, axis=0), "sum")):
            if alike(total, true.values):
                yield "tied weight" if tied else "no reduction", f"one part on each rank, whose {what} is right"
        right = [alike(value, true.values) for value in versions]
        if any(right):
            yield "unlike ranks", f"right on {sum(right)} of {len(right)} ranks"
        if samples:
            yield samples
    for kind in (d.kind, BEFORE, GRADIENT):
        earlier = c.wholes(c.reference, kind, d.step - 1).get(d.name)
        if earlier and earlier.values.any() and own.values.any():
            if alike(own.values, earlier.values):
                yield "stale", "that of the step before"
            if alike(own.values, true.values + earlier.values):
                yield "late clear", "with that of the step before added to it"
    k = factor(own.values, true.values)
    if k is not None:
        # In a pipeline the last stage alone has losses.
        passes = max(Counter(f["rank"] for f in c.candidate.by_kind["loss"] if f["step"] == d.step).values(), default=0)
        losses, loss = c.losses(c.candidate, d.step), sum(c.losses(c.reference, d.step).values())
        larger = sum(losses.values()) / len(losses) / loss if losses and loss else 1.0
        named = {
            "zero": k == 0,
            "accumulation": passes > 1 and abs(k / passes - 1) < ALIKE and abs(larger / passes - 1) < 0.2,
        }
        named |= {"sum for mean": abs(k / world - 1) < ALIKE, "doubled": abs(k - 2) < ALIKE}
        named |= {"divided twice": abs(k * world - 1) < ALIKE, "scaled": True}
        yield next(cause for cause, holds in named.items() if holds), words(k, world)
    parts = ((piece, *piece.within(true.values)) for piece in own.pieces)
    wrong = [p for p, whole, index in parts if not alike(p.values.reshape(-1), np.asarray(whole[index]).reshape(-1))]
    if 0 < len(wrong) < len(own.pieces):
        ranks = ", ".join(str(piece.rank) for piece in wrong)
        yield "one part" if any(p.values.any() for p in wrong) else "zero", f"wrong in the part of rank {ranks} alone"
    if samples:
        yield samples
    targets: dict[int, int] = {}
    for fact in c.candidate.by_kind["targets"]:
        if fact["step"] == d.step:
            targets[fact["rank"]] = targets.get(fact["rank"], 0) + fact["value"]
    if len({*targets.values()}) > 1 and c.loss_deviation(d.step) > c.tolerance:
        yield "padding", f"no multiple of the right one, and ranks have {[*targets.values()]} targets"
    agrees = c.loss_deviation(d.step) <= max(c.tolerance, ALIKE)
    yield "tied weight" if tied else "no reduction" if agrees else "forward", "no multiple of the right one"


def _samples(c: Proof, step: int) -> Finding | None:
    """Return what is wrong with the samples that the ranks' models got, if all got some."""
    of_rank: dict[int, list[str]] = {}
    for fact in c.candidate.by_kind["samples"]:
        if fact["step"] == step:
            of_rank.setdefault(fact["rank"], []).extend(fact["marks"])
    wanted = {mark for fact in c.reference.by_kind["samples"] if fact["step"] == step for mark in fact["marks"]}
    seen = {mark for marks in of_rank.values() for mark in marks}
    if not wanted or not seen or seen == wanted:
        return None
    same = len(of_rank) > 1 and len({tuple(marks) for marks in of_rank.values()}) == 1
    return ("same batch" if same else "samples", f"of {len(seen & wanted)} of the reference's {len(wanted)} samples")


def _update(c: Proof, d: Difference, own: Whole, true: Whole) -> Iterator[Finding]:
    if d.kind != WEIGHT:
        k = factor(own.values, true.values)
        yield "optimizer", words(k, c.candidate.world) if k is not None else "another value"
    versions = own.versions
    if not all(alike(value, versions[0], 1e-6) for value in versions):
        right = any(alike(value, true.values, 1e-6) for value in versions)
        yield "stale" if right else "unlike ranks", "unlike between ranks"
    before = c.wholes(c.reference, WEIGHT if d.step > 1 else START, d.step - 1)[d.name].values
    # An update may be small beside its weight.
    k = factor(own.values - before, true.values - before, 2.0**-21 * true.largest)
    if k is None:
        yield "optimizer", "another update"
    yield "rate" if k else "not held", f"an update {words(k or 0.0, c.candidate.world)}"
