"""The printed answer of a simulation: what fills a rank's memory, what a step asks of its device, and whether it fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptscale.common.measure.gpus import GIB
from gptscale.foresight.calibrate.costs import costs_for
from gptscale.foresight.memory.report import RankMemory, draw, filled_by
from gptscale.foresight.price.step_time import SPREAD, PricedStep, main_precision, step_times
from gptscale.foresight.simulate.program import Simulation
from gptscale.results.record.files import export
from gptscale.results.render import console, picture_bytes, table


def print_memory(simulation: Simulation, memory: RankMemory, title: str) -> None:
    """Print a rank's memory at its peak by owner, and what one step asks."""
    timeline = memory.timeline
    peak = timeline.peak_at
    rows = table(("what fills the peak", "GiB", "share"), left=("what fills the peak",), title=title)
    owners = memory.at_peak() | {"rounding of the allocator's blocks": memory.rounding()}
    for owner, nbytes in owners.items():
        if nbytes >= min(2**20, memory.allocated / 200):
            rows.add_row(owner, f"{nbytes / GIB:,.2f}", f"{nbytes / max(1, memory.allocated):.0%}")
    rows.add_row("allocated at most", f"{memory.allocated / GIB:,.2f}", "", end_section=True)
    rows.add_row("reserved by torch's allocator", f"{memory.reserved / GIB:,.2f}", "")
    for constant in memory.constants:
        rows.add_row(f"{constant.name} (a constant)", f"{constant.nbytes / GIB:,.2f}", "")
    rows.add_row("needed", f"{memory.needed / GIB:,.2f}", "")
    console(log_columns=120, highlight=False).print(rows)
    host = f"pinned on the host {memory.pinned / GIB:,.2f} GiB, which needs {memory.host / GIB:,.2f} GiB in all"
    print(f"peak     in {timeline.part_at(peak)}; {host}")
    if step := simulation.step:
        sent = sum(c["nbytes"] * c["count"] for c in step["collectives"]) / GIB
        count = sum(c["count"] for c in step["collectives"])
        host_s = simulation.host_s
        asked = f"; this host needs {1e3 * host_s:,.0f} ms to ask for it" if host_s else ""
        launches, tflop = f"{step['launches']:,} launches", f"products {step['product_flops'] / 1e12:,.1f} TFLOP"
        print(f"step     {launches}; {tflop}; {count:,} collectives of {sent:,.2f} GiB{asked}")


def print_verdict(memory: RankMemory, ranks_per_host: int) -> None:
    """Print whether a rank fits, and what is too much if it does not. ranks_per_host: that share a machine's memory."""
    over = (memory.needed - memory.capacity) / GIB
    if memory.out_of_memory:
        print(f"does not fit: {memory.out_of_memory} The memory is filled by {filled_by(memory)}.", file=sys.stderr)
    elif not memory.fits_host:
        need, share = memory.host / GIB, (memory.host_capacity or 0) / GIB
        print(
            f"does not fit on the host: a rank needs {need:.2f} GiB there, of which {memory.pinned / GIB:.2f} pinned, and has "
            f"{share:.2f}, the share of one of {ranks_per_host}",
            file=sys.stderr,
        )
    elif memory.fits_barely:
        print(f"fits     barely: the allocator has to give back {over:,.2f} GiB of what it keeps unused")
    elif not memory.fits:
        print(f"does not fit: {over:.2f} GiB too much, filled by {filled_by(memory)}", file=sys.stderr)
    else:
        print(f"fits     with {-over:,.2f} of {memory.capacity / GIB:,.2f} GiB free")


def times_of(simulations: Sequence[Simulation], device: str, per_node: int) -> dict[int, PricedStep]:
    """Return the time of a step of each rank whose step was recorded to its end. per_node: devices that a machine has."""
    recorded = {s.facts["rank"]: s.recorded for s in simulations if s.recorded}
    host_s = {s.facts["rank"]: s.host_s for s in simulations if s.recorded}
    precision = main_precision([work for works in recorded.values() for work in works])
    per_node = min([per_node, *(s.facts["world_size"] for s in simulations)])
    costs = costs_for(device, per_node, precision=precision, torch=simulations[0].facts["torch"])
    return step_times(recorded, costs, host_s)


def print_times(times: Mapping[int, PricedStep]) -> None:
    """Print how long a step takes, and what fills it."""
    for rank, time in times.items():
        whose = f", rank {rank}" if len(times) > 1 else ""
        about = f"{_s(time.step_s / SPREAD)} to {_s(time.step_s * SPREAD)}, {time.grade}"
        mfus = f"MFU {time.mfu:.0%}, with what is computed again {time.hfu:.0%}"
        print(f"time     {_s(time.step_s)} a step{whose} ({about}) if the host keeps up, bound by {time.bound}; {mfus}")
        busy = "; ".join(f"{kind} {_s(seconds)}" for kind, seconds in time.busy.items())
        print(f"         {busy}; only communicating {_s(time.only_sends)}; idle {_s(time.idle)}")
        # With a host of unknown speed both are the same.
        if time.with_host_s > time.step_s:
            print(f"         with a host as slow as this machine's beside the mock: {_s(time.with_host_s)}")
        if time.guessed:
            names = ", ".join(f"{count} x {name[:40]}" for name, count in time.guessed.items())
            print(f"note     the bytes of some kernels are a guess, from their threads: {names}")


def as_json(simulation: Simulation, memory: RankMemory, times: Mapping[int, PricedStep]) -> dict[str, Any]:
    """Return a rank's memory and, if it was recorded, its step and the time of that, in JSON's types."""
    host_s = (simulation.host_s or None) if simulation.recorded else None
    found = memory.as_json() | {"device": simulation.facts["device"], "host_s": host_s, "step": simulation.step}
    return found | {"time": times[memory.rank].as_json() if memory.rank in times else None}


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def save(
    about: Mapping[str, Any], simulations: Sequence[Simulation], memories: Sequence[RankMemory],
    times: Mapping[int, PricedStep], title: str, figures: Path | None, picture: Path | None,
) -> None:  # fmt: skip
    """Write all figures of ranks as JSON, and a picture of their memory over their last step, by owner, and name the files."""
    ranks = [s.facts | as_json(s, memory, times) for s, memory in zip(simulations, memories, strict=True)]
    if figures is not None:
        export(figures, f"{json.dumps({**about, 'ranks': ranks}, indent=1)}\n".encode())
    if picture is not None:
        export(picture, picture_bytes(draw(memories, title), picture.suffix[1:] or "png"))
    for path in filter(None, (picture, figures)):
        print(f"file     {path}")
