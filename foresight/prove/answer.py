"""What `gptscale prove` prints and writes: one line and a table, or the first value that is wrong and its likely cause."""

from __future__ import annotations

from typing import Any

from gptscale.foresight.prove.causes import CAUSES, finding
from gptscale.foresight.prove.compare import LATER, Proof
from gptscale.foresight.prove.program import RESHAPED
from gptscale.results.render import console, table


def answer(comparison: Proof) -> dict[str, Any]:
    """Return the answer with its figures, as it is written."""
    c, first = comparison, None
    if c.differences:
        d = c.differences[0]
        cause, how = finding(c, d)
        first = {name: getattr(d, name) for name in ("kind", "name", "step", "deviation", "unlike", "of")}
        first |= {"how": how, "cause": cause, "why": CAUSES[cause], "line": c.line.get(d.name)}
    notes = {
        "dropout was left out of both programs": c.reference.by_kind["dropout"] or c.candidate.by_kind["dropout"],
        "the programs name CUDA: the CPU took its place, and nothing was compiled": c.candidate.without_cuda,
        "losses are shown otherwise: gradients agree all the same": not first and c.worst["loss"] > c.tolerance,
        "the optimizer exchanges gradients within its step: they were compared by its updates": c.exchanged_in_step,
        RESHAPED: first and c.candidate.by_kind["reshaped"],
        f"compared as {c.precision}, whose rounding hides small faults: compare in fp32 too": c.tolerance > 1e-3,
    }
    facts = {"right": not first, "ranks": c.candidate.world, "steps": c.steps, "tolerance": c.tolerance}
    return facts | {"worst": c.worst, "first": first, "notes": [note for note, holds in notes.items() if holds]}


def show(answer: dict[str, Any]) -> None:
    """Print the answer."""
    first = answer["first"]
    if not first:
        steps = f"{answer['steps']} step{'s' * (answer['steps'] > 1)}"
        print(f"right    {answer['ranks']} ranks compute what one process computes, in {steps}")
    else:
        at = f"step {first['step']}" if first["step"] else "the start"
        what = f"of {first['name']}" if first["name"] else "by which gradients are clipped"
        print(f"WRONG    {first['kind']} {what} at {at}: {first['how']}")
        print(f"likely   {first['cause']}: {first['why']}")
        print(f"also     {first['unlike'] - 1} of {first['of'] - 1} other weights" if first["name"] else "")
        print(f"where    {first['line']}" if first["line"] else "")
    rows = [(kind, f"{deviation:.1e}") for kind, deviation in answer["worst"].items()]
    later = f", {LATER * answer['tolerance']:g} for gradients from step 2 on" if answer["steps"] > 1 else ""
    title = f"worst relative deviation (right: {answer['tolerance']:g}{later})"
    console(100).print(table(("what", title), rows, left=("what",)))
    for note in answer["notes"]:
        print(f"note     {note}")
