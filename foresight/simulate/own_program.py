"""The options and the printed answer of `gptscale simulate [options] -- COMMAND`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import tyro

from gptscale.common.errors import ConfigError
from gptscale.common.measure.gpus import GIB, PLAYED
from gptscale.common.settings.checks import check_output_file, check_range
from gptscale.common.settings.command_line import parse
from gptscale.foresight.memory.constants import outside_of_torch
from gptscale.foresight.mock_cuda.devices import device_named
from gptscale.foresight.simulate.program import ProgramError, ProgramTask, print_error, run_program
from gptscale.foresight.simulate.simulation import OOM_EXIT_STATUS
from gptscale.results.render import console, table

# What a program may take of this machine's free memory, unless --host-limit says more.
FREE_SHARE = 0.75
INTERVALS_SHOWN = 8
ABOUT = "Run a program of your own as one rank of any world, on GPUs that are not there: what does it need in memory?"


@dataclass(frozen=True)
class ProgramOptions:
    """Which rank of which world, on which device, and for how long."""

    world: int | None = None
    """Ranks of the world. Left out, the launcher's own words count (torchrun --nproc-per-node ...), or it is 1."""
    rank: str = "0"
    """Ranks to simulate, one after the other: numbers with commas between, or last."""
    device_kind: Annotated[str, tyro.conf.arg(name="as", help=f"The device to play: {' | '.join(PLAYED)}.")] = "h100-80"
    memory_gib: float | None = None
    """GiB of each device, if it has another size."""
    gpus_per_node: int = 8
    """Devices of one machine, where no launcher says it."""
    steps: int = 3
    """Steps of the optimizer after which the program is ended."""
    time_limit: int = 600
    """Seconds after which a program that has not made its steps is ended."""
    host_limit: float | None = None
    """GiB of this machine's memory that the program may take. By default three quarters of what is free."""
    host_values: bool = False
    """Let large tensors of the host keep their values, and take their memory. By default they share a few pages."""
    json: Path | None = None
    """File for all figures, in bytes."""

    def __post_init__(self) -> None:
        check_range(self.world, 1, 2**16, "world")
        check_range(self.memory_gib, 1e-3, 1e6, "memory_gib")
        check_range(self.gpus_per_node, 1, 64, "gpus_per_node")
        check_range(self.steps, 1, 10**6, "steps")
        check_range(self.time_limit, 1, 10**6, "time_limit")
        check_range(self.host_limit, 1e-3, 1e6, "host_limit")
        check_output_file(self.json, "--json", "cannot be written")
        device_named(self.device_kind)
        for rank in self.ranks():
            if rank != "last" and not (rank.isdecimal() and int(rank) < (self.world or 2**16)):
                world = f"0 to {self.world - 1}" if self.world else "0 on"
                raise ConfigError(f"no such rank: {rank[:40]!r}", "in --rank", f"use numbers from {world}, or last")

    def ranks(self) -> list[str]:
        """Return the words for the ranks."""
        return [word.strip() for word in self.rank.split(",")]

    def report(self, command: Sequence[str], rank: str, folder: Path | None = None) -> dict[str, Any]:
        """Simulate one of the ranks and return its figures, in bytes. Raises ProgramError if the program makes no steps.

        folder: where the program runs, None for the current one.
        """
        device = device_named(self.device_kind)
        if self.memory_gib:
            device = replace(device, memory=int(self.memory_gib * GIB))
        limit = self.host_limit * GIB if self.host_limit else FREE_SHARE * psutil.virtual_memory().available
        task = ProgramTask(
            command,
            self.world,
            rank,
            device,
            self.gpus_per_node,
            self.steps,
            self.time_limit,
            int(limit),
            not self.host_values,
            folder,
        )
        return _completed(run_program(task), self.steps)


def simulate_program(words: Sequence[str], command: Sequence[str]) -> int:
    """Simulate each rank of a program and return 0 if all fit, or the status of a rank that is out of memory."""
    options = parse(ProgramOptions, words, prog="gptscale simulate [options] -- COMMAND", about=ABOUT)
    if not command:
        raise ConfigError("no program", "behind --", "write the command as you type it today")
    reports = []
    for rank in options.ranks():
        with console(stderr=True).status(f"rank {rank} of {' '.join(command)[:60]}"):
            try:
                reports.append(options.report(command, rank))
            except ProgramError as error:
                return print_error(error)
        _print(reports[-1], options)
    if options.json is not None:
        text = json.dumps({"command": list(command), "as": options.device_kind, "ranks": reports}, indent=1)
        options.json.write_text(f"{text}\n")
        print(f"file     {options.json}")
    return 0 if all(report["fits"] for report in reports) else OOM_EXIT_STATUS


def _completed(facts: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return a program's report with its peaks, what lies beside torch's allocator, and whether it fits."""
    peaks = {f"peak_{name}": max(i[name] for i in facts["intervals"]) for name in ("allocated", "reserved")}
    outside = outside_of_torch(facts["communicators"])
    constants = {constant.name: constant.nbytes for constant in outside}
    out_of_memory = bool(facts["refused_bytes"]) and facts["steps"] < steps
    needed = peaks["peak_allocated"] + sum(constants.values())
    fits = not out_of_memory and needed <= facts["device_memory"]
    return {**facts, **peaks, "constants": constants, "out_of_memory": out_of_memory, "fits": fits}


def _print(report: dict[str, Any], options: ProgramOptions) -> None:
    gib = {name: f"{value / GIB:,.2f}" for name, value in report.items() if isinstance(value, int)}
    title = f"rank {report['rank']} of {report['world_size']} on {report['device']}, torch {report['torch']}"
    rows = table(("memory of the device", "GiB"), left=("memory of the device",), title=title)
    for name, nbytes in report["held"].items():
        rows.add_row(f"{name} of the optimizer" if name == "parameters" else name, f"{nbytes / GIB:,.2f}")
    rest = report["peak_allocated"] - sum(report["held"].values())
    rows.add_row("all else at the peak: activations, gradients, gathered weights", f"{rest / GIB:,.2f}")
    rows.add_row("allocated at most", gib["peak_allocated"], end_section=True)
    rows.add_row("reserved by torch's allocator", gib["peak_reserved"])
    for name, nbytes in report["constants"].items():
        rows.add_row(f"{name} (a constant)", f"{nbytes / GIB:,.2f}")
    console(log_columns=120, highlight=False).print(rows)
    if len(report["intervals"]) > 1:
        print("peaks    between the program's own resets, allocated and reserved, the last ones last:")
        for each in report["intervals"][-INTERVALS_SHOWN:]:
            allocated, reserved = (each[name] / GIB for name in ("allocated", "reserved"))
            print(f"         up to step {each['steps']}: {allocated:,.2f} {reserved:,.2f} GiB")
    host = (report["pinned"] + report["host_shared"]) / GIB
    print(f"host     {gib['pinned']} GiB pinned, {host:,.2f} GiB in large tensors")
    if step := report["step"]:
        sent = sum(c["nbytes"] * c["count"] for c in step["collectives"]) / GIB
        count = sum(c["count"] for c in step["collectives"])
        launches, tflop = step["launches"], step["product_flops"] / 1e12
        print(f"step     {launches:,} launches; products {tflop:,.1f} TFLOP; {count:,} collectives of {sent:,.2f} GiB")
    _print_verdict(report, options)


def _print_verdict(report: dict[str, Any], options: ProgramOptions) -> None:
    capacity = report["device_memory"]
    outside = sum(report["constants"].values())
    if report["out_of_memory"]:
        asked = report["refused_bytes"][-1] / 2**20
        said = f"CUDA out of memory after {report['steps']} steps: {asked:,.2f} MiB more were asked for"
        print(f"does not fit: {said}, of {capacity / GIB:,.2f} GiB in all", file=sys.stderr)
    elif not report["fits"]:
        over = (report["peak_allocated"] + outside - capacity) / GIB
        print(f"does not fit: {over:,.2f} GiB too much, with what lies beside torch's allocator", file=sys.stderr)
    elif report["peak_reserved"] + outside > capacity:
        print("fits     barely: the allocator has to give back what it keeps unused")
    else:
        free = (capacity - outside - report["peak_reserved"]) / GIB
        print(f"fits     with {free:,.2f} of {capacity / GIB:,.2f} GiB free")
    print(f"ended    by {report['ended_by']}, after {report['steps']} steps")
    print("note     every value was zero: losses, norms and times of the program mean nothing")
    if report["ended_by"] == "its last step":
        print("note     an evaluation or a save that comes later was not reached: it may need more")
    if report["lacking"]:
        print(f"note     the mock lacks {', '.join(report['lacking'])}, which the program went on without")
    if report["refused_bytes"] and not report["out_of_memory"]:
        print(f"note     the program went on after {len(report['refused_bytes'])} allocations were refused")
