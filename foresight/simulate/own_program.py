"""The options and the printed answer of `gptscale simulate [options] -- COMMAND`."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from gptscale.common.errors import ConfigError
from gptscale.common.measure.gpus import GIB, SIMULATED
from gptscale.common.settings.checks import check_output_file, check_ranges
from gptscale.common.settings.command_line import parse
from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.mock_cuda.devices import device_named, ranks_named
from gptscale.foresight.mock_cuda.watch import GRADIENT, PARAMETER, STATE
from gptscale.foresight.simulate.answer import print_memory, print_times, print_verdict, save, times_of
from gptscale.foresight.simulate.processes import ProgramError, print_error
from gptscale.foresight.simulate.program import ProgramTask, Simulation, run_program
from gptscale.results.render import console

OOM_EXIT_STATUS = 7
INTERVALS_SHOWN = 8
ALL_STAGES = "all-stages"
# Blocks that another stream still uses were given back, and are not yet free.
EVENTS_OPEN = 1000
ABOUT = "A program of your own as one rank of any world, on GPUs that are not there: what memory and time does it need?"


@dataclass(frozen=True)
class ProgramOptions:
    """Which rank of which world, on which device, and for how long."""

    world: int | None = None
    """Ranks of the world. Left out, the launcher's own words count (torchrun --nproc-per-node ...), or it is 1."""
    rank: str = "0"
    """Ranks to simulate, one after the other: numbers with commas between, last, or all-stages (the first, and each that one of
    them sends to)."""
    device_kind: Annotated[str, tyro.conf.arg(name="as", help=f"The device: {' | '.join(SIMULATED)}.")] = "h100-80"
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
    fit: str | None = None
    """An option of the program with a whole number, as batch_size: find the largest with which the first rank fits."""
    no_weights: bool = False
    """Weights need not be there: models of transformers come from their configuration, other files that are missing are empty."""
    fake_batches: bool = False
    """A DataLoader yields its first batch again and again."""
    balanced_experts: bool = False
    """Routers give each expert as many tokens as any other. By default all values are zeros, and so are the routes."""
    host_values: bool = False
    """Let large tensors of the host keep their values, and take their memory. By default they share a few pages."""
    png: Path | None = None
    """File for a picture of the memory over the last step, by owner (.png, .svg or .pdf)."""
    json: Path | None = None
    """File for all figures, in bytes."""

    def __post_init__(self) -> None:
        check_ranges(self, {"world": (1, 2**16), "gpus_per_node": (1, 64)})
        check_ranges(self, dict.fromkeys(("steps", "time_limit"), (1, 10**6)))
        check_ranges(self, dict.fromkeys(("memory_gib", "host_limit"), (1e-3, 1e6)))
        check_output_file(self.json, "--json", "cannot be written")
        check_output_file(self.png, "--png", "cannot be written")
        device_named(self.device_kind)
        self.ranks()

    def ranks(self) -> list[str]:
        """Return the words for the ranks. All stages begin with the first."""
        return ["0"] if self.rank == ALL_STAGES else ranks_named(self.rank, self.world, ALL_STAGES)

    def simulate(
        self, command: Sequence[str], rank: str, folder: Path | None = None, inbox: Path | None = None
    ) -> Simulation:
        """Simulate one of the ranks. Raises ProgramError if the program makes no steps.

        folder: where the program runs, None for the current one. inbox: what ranks that were simulated before have sent.
        """
        device = device_named(self.device_kind)
        if self.memory_gib:
            device = replace(device, memory=int(self.memory_gib * GIB))
        how: dict[str, Any] = {name: getattr(self, name) for name in ("no_weights", "fake_batches", "balanced_experts")}
        how |= {"share_host_memory": not self.host_values, "folder": folder, "inbox": inbox}
        sizes = self.gpus_per_node, self.steps, self.time_limit
        how |= {"host_limit": self.host_limit * GIB} if self.host_limit else {}
        return run_program(ProgramTask(command, self.world, rank, device, *sizes, **how))


def simulate_program(words: Sequence[str], command: Sequence[str]) -> int:
    """Simulate each rank of a program and return 0 if all fit, or the status of a rank that is out of memory."""
    options = parse(ProgramOptions, words, prog="gptscale simulate [options] -- COMMAND", about=ABOUT)
    if not command:
        raise ConfigError("no program", "behind --", "write the command as you type it today")
    simulations: list[Simulation] = []
    memories: list[RankMemory] = []
    try:
        if options.fit is not None:
            command = _with_the_most(options, command, options.fit)
        for simulation in _ranks(options, command):
            simulations.append(simulation)
            memories.append(simulation.memory())
            _print(simulation, memories[-1])
    except ProgramError as error:
        return print_error(error)
    times = times_of(simulations, options.device_kind, options.gpus_per_node)
    print_times(times)
    title = f"{' '.join(Path(word).name for word in command)[:40]} on {options.device_kind}: memory over the last step, by owner"
    about = {"command": list(command), "as": options.device_kind}
    save(about, simulations, memories, times, title, options.json, options.png)
    if too_large := next((memory for memory in memories if memory.is_too_large), None):
        print(_advice(too_large), file=sys.stderr)
    return OOM_EXIT_STATUS if too_large else 0


def _ranks(options: ProgramOptions, command: Sequence[str]) -> Iterator[Simulation]:
    """Yield the simulation of each rank that is asked for.

    Where a rank has several stages, the first may wait for the last. It is simulated again when others have sent more.
    """
    waiting, done, met = options.ranks(), set[str](), dict[str, int]()
    with tempfile.TemporaryDirectory(prefix="gptscale-inbox-") as inbox:
        while waiting:
            rank = waiting.pop(0)
            try:
                with console(stderr=True).status(f"rank {rank} of {' '.join(command)[:60]}"):
                    simulation = options.simulate(command, rank, inbox=Path(inbox))
            except ConfigError:
                files = os.listdir(inbox)
                if options.rank != ALL_STAGES or met.get(rank, 0) == len(files):
                    raise
                met[rank] = len(files)
                receivers = dict.fromkeys(name.split(".")[2] for name in files)
                waiting = [*(peer for peer in receivers if peer not in (*done, *met, *waiting)), *waiting, rank]
                continue
            yield simulation
            done.add(rank)
            if options.rank == ALL_STAGES:
                waiting += [peer for peer in map(str, simulation.facts["sends_to"]) if peer not in (*done, *waiting)]


def _with_the_most(options: ProgramOptions, command: Sequence[str], name: str) -> list[str]:
    """Return a command with the largest number of an option with which the first rank fits. Raises ConfigError if none does."""
    place, before, start = place_of(command, name)

    def with_number(number: int) -> list[str]:
        return [*command[:place], f"{before}{number}", *command[place + 1 :]]

    def fits(number: int) -> bool:
        with console(stderr=True).status(f"{name} {number}"):
            memory = options.simulate(with_number(number), options.ranks()[0]).memory()
        print(f"try      {name} {number} {'does not fit' if memory.is_too_large else 'fits'}", flush=True)
        return not memory.is_too_large

    most = most_that_fits(start, fits)
    if not most:
        raise ConfigError(f"{name} 1 does not fit", "in --fit", "shard more, recompute more, or use more GPUs")
    return with_number(most)


def _advice(memory: RankMemory) -> str:
    """Return what would make a rank fit, by what fills its peak."""
    owners = memory.at_peak()
    state = sum(owners.get(kind, 0) for kind in (PARAMETER, GRADIENT, STATE))
    rest = sum(owners.values()) - state
    return (
        f"to fit   {rest / GIB:,.2f} GiB grow with the batch: a smaller one (--fit finds the largest), or recompute activations; "
        f"{state / GIB:,.2f} GiB are parameters, gradients and optimizer state: shard them over more ranks, or offload them"
    )


def _print(simulation: Simulation, memory: RankMemory) -> None:
    facts = simulation.facts
    print_memory(simulation, memory, f"rank {memory.rank} of {facts['world_size']} on {facts['device']}")
    if len(facts["intervals"]) > 1:
        print("peaks    between the program's own resets, allocated and reserved, the last ones last:")
        for each in facts["intervals"][-INTERVALS_SHOWN:]:
            allocated, reserved = (each[name] / GIB for name in ("allocated", "reserved"))
            print(f"         up to step {each['steps']}: {allocated:,.2f} {reserved:,.2f} GiB")
    print_verdict(memory, 1)
    print(f"ended    by {facts['ended_by']}, after {facts['steps']} steps, with torch {facts['torch']}")
    print("note     every value was zero: losses, norms and times of the program mean nothing")
    if facts["ended_by"] == "its last step":
        print("note     an evaluation or a save that comes later was not reached: it may need more")
    for experts, times in (facts["experts"] or {}).items():
        print(f"note     tokens were dealt to {experts} experts in turn, {times} times in all")
    if facts["experts"] == {}:
        print("note     --balanced-experts found no router: no topk, sort or maximum over 2 to 1,024 scores")
    if facts["lacking"]:
        print(f"note     the mock lacks {', '.join(facts['lacking'])}, which the program went on without")
    if facts["refused_bytes"] and not memory.out_of_memory:
        print(f"note     the program went on after {len(facts['refused_bytes'])} allocations were refused")
    if memory.timeline.times < facts["events"] - EVENTS_OPEN:
        print("note     the program keeps a memory history of its own: not all of the peak could be given an owner")


# A batch is no larger than this.
MOST = 2**20


def place_of(command: Sequence[str], name: str) -> tuple[int, str, int]:
    """Return which word of a command holds the number of an option, what stands before the number in it, and the number.

    name: `batch_size` means `--batch-size 8`, `--batch_size=8` and `batch_size=8`. Raises ConfigError if it is not there once.
    """
    spelled = re.escape(name.lstrip("-")).replace(r"\-", "_").replace("_", "[-_]")
    found = []
    for i, (word, following) in enumerate(zip(command, [*command[1:], ""], strict=True)):
        option, equals, number = word.partition("=")
        place, before, number = (i, f"{option}=", number) if equals else (i + 1, "", following)
        if re.fullmatch(rf"(--?)?{spelled}", option) and number.isdecimal():
            found.append((place, before, int(number)))
    if len(found) != 1 or found[0][2] < 1:
        fix = f"write the command with --{name.lstrip('-')} 1 or another whole number"
        raise ConfigError(f"the command names {name} {len(found)} times with a number", "in --fit", fix)
    return found[0]


def most_that_fits(start: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number for which `fits` is true, 0 if there is none. It is asked for few numbers, `start` first."""
    low, high = 0, start
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    while high <= MOST and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
