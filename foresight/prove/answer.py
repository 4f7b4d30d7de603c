"""What `gptscale prove` prints and writes: one line and a table, or the first value that is wrong and its likely cause."""

from __future__ import annotations

from typing import Any

from gptscale.foresight.prove.causes import finding
from gptscale.foresight.prove.compare import NORM, Comparison
from gptscale.results.render import console, table


def print_answer(comparison: Comparison) -> None:
    """Print whether the two programs agree, and how well, or what is wrong first."""
    ranks, steps = comparison.candidate.world, comparison.steps
    if not comparison.differences:
        print(
            f"right    {steps} steps on {ranks} ranks compute what one process computes, within {comparison.tolerance:g}"
        )
    else:
        first = comparison.differences[0]
        found = finding(comparison, first)
        what = f"{first.kind} of {first.name}" if first.name else f"the {first.kind} that clipping used"
        print(f"WRONG    {what}, {f'step {first.step}' if first.step else 'before the first step'}: {found.how}")
        print(f"likely   {found.cause}: {found.why}")
        if line := comparison.line.get(first.name):
            print(f"where    {line}")
        if first.kind != NORM:
            print(f"weights  {first.others[0]} of {first.others[1]} are wrong so")
    rows = [(kind, f"{deviation:.1e}") for kind, deviation in comparison.worst.items()]
    console(100).print(table(("worst deviation of the", "relative"), rows, left=("worst deviation of the",)))
    for note in notes(comparison):
        print(f"note     {note}")


def notes(comparison: Comparison) -> list[str]:
    """Return what a reader has to know beside the answer."""
    reference, candidate = comparison.reference, comparison.candidate
    both = {
        "dropout was left out of both programs": reference.by_kind["dropout"] or candidate.by_kind["dropout"],
        "the program names CUDA: the CPU took its place": candidate.without_cuda,
        "no loss was seen, as of a backward pass that begins with a gradient": not candidate.by_kind["loss"],
        "losses are shown otherwise: gradients agree all the same": comparison.worst.get("loss", 0)
        > comparison.tolerance
        and not comparison.differences,
        f"compared as {comparison.precision}, whose rounding hides smaller faults: compare in fp32 too": comparison.precision
        in ("bfloat16", "float16"),
    }
    return [note for note, holds in both.items() if holds]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the answer for a file."""
    different = []
    for each in comparison.differences[:1]:
        found = finding(comparison, each)
        facts = {"kind": each.kind, "name": each.name, "step": each.step, "deviation": each.deviation}
        facts |= {"how": found.how, "cause": found.cause, "why": found.why, "line": comparison.line.get(each.name)}
        different.append(facts | {"unlike": each.others[0], "of": each.others[1]})
    return {
        "right": not comparison.differences,
        "ranks": comparison.candidate.world,
        "steps": comparison.steps,
        "tolerance": comparison.tolerance,
        "precision": comparison.precision,
        "worst": comparison.worst,
        "first": different[0] if different else None,
        "notes": notes(comparison),
    }
