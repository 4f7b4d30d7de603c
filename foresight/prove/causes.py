"""How a value is unlike the reference's, and what therefore is likely wrong: a row for each cause.

A factor tells much: 2 or n or 1/n say that a reduction happened twice, as a sum, or once too often. So does what the ranks hold:
if their mean is right, nobody took it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gptscale.foresight.prove.compare import BEFORE, GRADIENT, NORM, WEIGHT, Array, Comparison, Difference, Whole

# Patterns are seen through the rounding of either side.
ALIKE = 2e-3


@dataclass(frozen=True)
class Finding:
    """What is wrong. cause: a short name. how: what was seen of the tensor. why: what likely makes it so."""

    cause: str
    how: str
    why: str


def alike(one: Array, other: Array, precision: float = ALIKE) -> bool:
    """Return whether two arrays are equal but for some rounding."""
    return bool(np.abs(one - other).max(initial=0.0) <= precision * np.abs(other).max(initial=0.0) + 1e-30)


def factor(own: Array, true: Array) -> float | None:
    """Return k if an array is k times another one."""
    square = float((true * true).sum())
    k = float((own * true).sum()) / square if square else 0.0
    if not own.any():
        return 0.0
    return k if math.isfinite(k) and alike(own, k * true) else None


def words(k: float, world: int) -> str:
    """Return a factor in words."""
    named = {0.0: "zero", 2.0: "times 2", world: f"times {world}, the number of ranks"}
    named |= (
        {1 / world: f"times 1/{world}, one over the number of ranks", 0.5: "times 1/2"}
        if world > 2
        else {0.5: "times 1/2"}
    )
    root = math.sqrt(world)
    named |= {
        root: f"times {root:.3f}, the root of the number of ranks",
        1 / root: f"times {1 / root:.3f}, one over their root",
    }
    return next((text for value, text in named.items() if abs(k - value) <= ALIKE * max(value, 1e-3)), f"times {k:.4g}")


def finding(comparison: Comparison, difference: Difference) -> Finding:
    """Return how the first difference looks, and its likely cause."""
    return next(_findings(comparison, difference))


def _findings(comparison: Comparison, d: Difference) -> Iterator[Finding]:
    own: Any = d.actual
    if d.step == 0:
        yield Finding(
            "no broadcast", "unlike between ranks", "ranks begin with other weights each: nothing broadcasts them"
        )
    elif d.kind == NORM:
        yield from _norm(comparison, d)
    elif own is None and d.kind == BEFORE:
        yield Finding("norm omits", "left out", "the candidate clips without this weight")
    elif own is None:
        yield Finding("not held", "missing", "no optimizer of the candidate holds this weight")
    elif d.kind in (BEFORE, GRADIENT):
        if d.kind == GRADIENT:
            yield from _clipped(comparison, d)
        yield from _gradient(comparison, d, own, d.expected)
    else:
        yield from _update(comparison, d, own, d.expected)


def _norm(c: Comparison, d: Difference) -> Iterator[Finding]:
    world, values = c.candidate.world, [*d.actual.values()]
    if max(values) - min(values) > c.tolerance * abs(d.expected):
        together = math.sqrt(sum(value**2 for value in values))
        how = f"unlike between ranks ({', '.join(f'{value:.4g}' for value in values)}, not {d.expected:.4g})"
        why = (
            "each rank takes the norm of what it holds"
            if abs(together / d.expected - 1) < ALIKE
            else "each takes another norm"
        )
        yield Finding("norm of a shard", how, f"{why}: sum the squares over ranks")
    k = values[0] / d.expected if d.expected else math.inf
    how = f"{words(k, world)} ({values[0]:.4g}, not {d.expected:.4g})"
    if min(abs(k - math.sqrt(world)), abs(k - 1 / math.sqrt(world))) < ALIKE:
        yield Finding("norm by root", how, "shards are counted once for all ranks, or once for each")
    if BEFORE not in c.kinds and any(abs(k - value) < ALIKE * value for value in (2, world, 1 / world, 0.5)):
        yield Finding(
            "sum for mean", how, "gradients were so before they were clipped: a sum stands where a mean is meant"
        )
    yield Finding(
        "norm omits",
        how,
        "the norm leaves out some weights, or counts some twice" if k < 1 else "some weights count twice",
    )


def _clipped(c: Comparison, d: Difference) -> Iterator[Finding]:
    if BEFORE not in c.kinds:
        if c.reference.by_kind[NORM] and not c.candidate.by_kind[NORM]:
            raw = c.wholes(c.reference, BEFORE, d.step).get(d.name)
            if raw is not None and alike(d.actual.values, raw.values):
                yield Finding("not clipped", "not clipped", "the reference clips gradients and the candidate does not")
        return
    values = d.actual.versions
    unlike = " unlike between ranks," if values and not all(alike(value, values[0]) for value in values) else ""
    how = f"right before clipping,{unlike} wrong after it"
    yield Finding("clipped otherwise", how, "ranks clip by another limit or norm than the reference")


def _gradient(c: Comparison, d: Difference, own: Whole, true: Whole) -> Iterator[Finding]:
    world, versions = c.candidate.world, own.versions
    samples = _samples(c, d.step)
    copies = {(piece.rank, piece.copy): piece.values for piece in own.pieces if piece.values.size == true.values.size}
    tied = sum(1 for name in c.tied.values() if name == d.name) > 1
    if len(versions) > 1 and not all(alike(value, versions[0]) for value in versions):
        right = [rank for (rank, _), value in copies.items() if alike(value.reshape(true.size), true.values)]
        if tied and d.others[0] < d.others[1] and alike(sum(versions), true.values):
            yield Finding(
                "tied weight",
                "in parts that sum to the right one",
                "a tied weight is on several ranks, and nobody sums it",
            )
        for total, what in ((sum(versions) / len(versions), "mean"), (sum(versions), "sum")):
            if alike(total, true.values):
                groups = len({value.tobytes() for value in versions})
                group = " or goes over the wrong group" if 1 < groups < world or world == 2 else ""
                yield Finding(
                    "no reduction", f"one rank's part on each, whose {what} is right", f"a reduction is missing{group}"
                )
        if right:
            wrong = sorted({rank for rank, _ in copies} - {*right})
            yield Finding("unlike ranks", f"right on some ranks, wrong on {wrong}", "ranks do not do the same")
        if samples:
            yield samples
        total = factor(sum(versions), true.values)
        if total:
            yield Finding(
                "no reduction", f"one rank's part on each ({words(total, world)} in sum)", "a reduction is missing"
            )
    if own.values.any() and (before := _earlier(c, d, own, true)):
        yield before
    k = factor(own.values, true.values)
    losses = c.losses(c.reference, d.step), c.losses(c.candidate, d.step)
    ratio = 0.0
    if losses[0] and losses[1] and losses[0][0]:
        ratio = sum(losses[1].values()) / len(losses[1]) / losses[0][0]
    passes = sum(f["step"] == d.step and f["rank"] == 0 for f in c.candidate.by_kind["loss"])
    if k is not None:
        how = words(k, world)
        if k == 0:
            yield Finding("zero", how, "this piece is detached, or its gradient is left out")
        if passes > 1 and abs(k / passes - 1) < ALIKE and abs(ratio / passes - 1) < 0.2:
            yield Finding(
                "accumulation", f"times {passes}, the number of backward passes", "accumulated losses are not divided"
            )
        if abs(k / world - 1) < ALIKE and abs(ratio / world - 1) < 0.2:
            yield Finding(
                "sum for mean", how, "the loss is as many times too large: a sum of losses where their mean is meant"
            )
        if abs(k / world - 1) < ALIKE:
            yield Finding("sum for mean", how, "a sum stands where a mean is meant, or a reduction is done twice")
        if abs(k - 2) < ALIKE:
            yield Finding("doubled", how, "a reduction, or the weight itself, is counted twice")
        if abs(k * world - 1) < ALIKE:
            yield Finding(
                "divided twice", how, "a mean is divided again, or ranks without this weight count in its mean"
            )
        yield Finding("scaled", how, "the loss or the gradient is scaled")
    parts = {
        piece.rank: factor(piece.values, true.values.reshape(-1)[piece.places(true.size)].reshape(piece.values.shape))
        for piece in own.pieces
    }
    if any(k is not None and abs(k - 1) < ALIKE for k in parts.values()) and len(own.pieces) > 1:
        rank, k = next((rank, k) for rank, k in parts.items() if k is None or abs(k - 1) >= ALIKE)
        how = f"wrong in the part of rank {rank} alone" + (f" ({words(k, world)})" if k is not None else "")
        yield Finding("zero" if k == 0 else "one part", how, f"rank {rank} loses or changes its part of the gradient")
    if samples:
        yield samples
    targets: dict[int, int] = {}
    for fact in c.candidate.by_kind["targets"]:
        if fact["step"] == d.step:
            targets[fact["rank"]] = targets.get(fact["rank"], 0) + fact["value"]
    if len({*targets.values()}) > 1 and not c.loss_deviation(d.step) <= ALIKE * c.tolerance:
        how = f"near, but no multiple; ranks had {', '.join(str(targets[rank]) for rank in sorted(targets))} targets"
        yield Finding("padding", how, "each rank takes its own mean: divide by the targets of all ranks")
    if tied and d.others[0] < d.others[1]:
        yield Finding("tied weight", "another value", "only a tied weight is wrong: its two uses are not summed")
    if c.loss_deviation(d.step) <= max(c.tolerance, ALIKE):
        why = "losses agree, so what is wrong comes after them: a reduction is missing, or goes over the wrong group"
        yield Finding("no reduction", "no multiple of the right one", why)
    yield Finding(
        "forward", "no multiple of the right one", "losses differ as well: the model or its samples are others"
    )


def _earlier(c: Comparison, d: Difference, own: Whole, true: Whole) -> Finding | None:
    """Return what says that a gradient of the step before is in this one, if it is."""
    for kind in (d.kind, BEFORE, GRADIENT):
        earlier = c.wholes(c.reference, kind, d.step - 1).get(d.name)
        if earlier is not None and earlier.values.any():
            if alike(own.values, earlier.values):
                return Finding(
                    "stale",
                    "that of the step before",
                    "the update comes before the exchange, or before the backward pass",
                )
            if alike(own.values, true.values + earlier.values):
                return Finding(
                    "late clear", "with that of the step before added", "gradients are cleared too late, or not at all"
                )
    return None


def _samples(c: Comparison, step: int) -> Finding | None:
    """Return what is wrong with the samples that the ranks' models got, if all got some."""
    of_rank: dict[int, list[str]] = {}
    for fact in c.candidate.by_kind["samples"]:
        if fact["step"] == step:
            of_rank.setdefault(fact["rank"], []).extend(fact["marks"])
    wanted = {mark for fact in c.reference.by_kind["samples"] if fact["step"] == step for mark in fact["marks"]}
    seen = {mark for marks in of_rank.values() for mark in marks}
    if not wanted or not seen or seen == wanted:
        return None
    how = f"that of other samples: {len(seen & wanted)} of the reference's {len(wanted)} were seen"
    if len(of_rank) > 1 and len({tuple(marks) for marks in of_rank.values()}) == 1:
        return Finding("same batch", how, "all ranks read the same samples: their loader does not split them")
    return Finding("samples", how, "ranks read other samples than the reference: compare batch sizes and samplers")


def _update(c: Comparison, d: Difference, own: Whole, true: Whole) -> Iterator[Finding]:
    versions = own.versions
    unlike = len(versions) > 1 and not all(alike(value, versions[0], 1e-6) for value in versions)
    if d.kind != WEIGHT:
        k = factor(own.values, true.values)
        how = words(k, c.candidate.world) if k is not None else "another value"
        yield Finding(
            "optimizer state", how, "gradients agree: the optimizer has other options, or its state is lost or late"
        )
    before = c.wholes(c.reference, WEIGHT if d.step > 1 else "start", d.step - 1)[d.name].values
    if unlike and any(alike(value, true.values, 1e-6) for value in versions):
        yield Finding(
            "stale", "right on some ranks, unlike on others", "new values are not sent to all ranks after the step"
        )
    if unlike:
        yield Finding("unlike ranks", "unlike between ranks", "ranks do not make the same update")
    k = factor(own.values - before, true.values - before)
    if k == 0:
        yield Finding("not held", "not changed by the step", "no optimizer of the candidate updates this weight")
    if k is not None:
        how = f"an update {words(k, c.candidate.world)}"
        yield Finding("rate", how, "gradients agree: the learning rate is another one, or is scaled by the ranks")
    yield Finding(
        "optimizer", "another update", "gradients agree: the optimizer has other options, as weight decay or moments"
    )
