"""`gptscale simulate`: what one rank of any world needs in memory and time, on a machine without that world.

Behind `--` stands a program of the user's own, and before it the options of ProgramOptions.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from gptscale.common.errors import ConfigError
from gptscale.common.measure.gpus import GIB, SIMULATED
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.checks import OptionNeed, check_ranges
from gptscale.common.settings.run_config import KEPT, RunConfig
from gptscale.foresight.mock_cuda.devices import device_named, ranks_named
from gptscale.launchers.run.options import default_recipe_config, parse_launch, take_recipe
from gptscale.recipes import get, names_with
from gptscale.results.render import console

if TYPE_CHECKING:
    from gptscale.foresight.simulate.program import Simulation


# A few steps are simulated, whatever the run would do, and nothing is saved or read again.
WITHOUT_EFFECT = ",".join(("steps", "on_spike", *KEPT))


@dataclass(frozen=True)
class SimulateOptions:
    """Which rank of which world, on which device."""

    nproc: int = 1
    """Processes of the world, one per device."""
    rank: str = "0"
    """Ranks to simulate: numbers with commas between, last, or stages (the first rank of each pipeline stage)."""
    device_kind: Annotated[str, tyro.conf.arg(name="as", help=f"The device: {' | '.join(SIMULATED)}.")] = "h100-80"
    gpus_per_node: int = 8
    """Devices of one machine."""
    host_memory: float | None = None
    """GiB of one machine's own memory, which its ranks share."""
    save: Path | None = None
    """Folder for simulation.json and simulation.png."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed(WITHOUT_EFFECT, lambda o: False, "a simulation is a few steps and leaves no run"),
    )

    def __post_init__(self) -> None:
        check_ranges(self, {"nproc": (1, 2**16), "gpus_per_node": (1, 64), "host_memory": (1e-6, 1e6)})
        check_folder(self.save)
        device_named(self.device_kind)

    def host_capacity(self) -> int | None:
        """Return a rank's bytes of its machine. On a machine that has fewer ranks, each has more."""
        ranks = min(self.gpus_per_node, self.nproc)
        return None if self.host_memory is None else int(self.host_memory * GIB / ranks)


def check_folder(folder: Path | None) -> None:
    """Raise ConfigError for a folder that cannot be made, because a file has its name or that of one above it."""
    if folder is not None:
        above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not above.is_dir():
            raise ConfigError(f"{above} is no folder", "in --save", "name a folder")


def main(argv: Sequence[str]) -> int:
    """Simulate the recipe that the first word names, or the program behind `--`, and return 0 if every rank fits."""
    if "--" in argv:
        from gptscale.foresight.simulate.own_program import simulate_program

        at = list(argv).index("--")
        return simulate_program(argv[:at], argv[at + 1 :])
    usage = "gptscale simulate RECIPE [options], or simulate [options] -- COMMAND (options: simulate --help --)"
    recipe, words = take_recipe(argv, usage)
    config, recipe_config, options = parse_launch(recipe, words, SimulateOptions, "simulate")
    assert options is not None
    if config.device == "cpu":
        raise ConfigError("ranks on CPUs are not simulated", "in --device cpu", "leave it out: no GPU is needed")
    ranks = ranks_of(recipe, config, options)
    from gptscale.foresight.simulate.answer import print_memory, print_times, print_verdict, save, times_of
    from gptscale.foresight.simulate.simulation import simulate

    world: dict[str, Any] = {"device": options.device_kind, "world_size": options.nproc}
    world["ranks_per_node"] = options.gpus_per_node
    simulations = []
    for rank in ranks:
        with console(stderr=True).status(f"rank {rank} of {options.nproc}"):
            simulations.append(simulate(recipe, config, recipe_config, rank=rank, **world))
    memories = [simulation.memory(options.host_capacity()) for simulation in simulations]
    times = times_of(simulations, options.device_kind, options.gpus_per_node)
    for simulation, memory in zip(simulations, memories, strict=True):
        title = f"{recipe}, rank {memory.rank} of {options.nproc}, on {simulation.facts['device']}"
        print_memory(simulation, memory, title)
        print_verdict(memory, min(options.gpus_per_node, options.nproc))
    print_times(times)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        about = {"recipe": recipe, "world_size": options.nproc}
        about["options"] = {f.name: str(getattr(config, f.name)) for f in dataclasses.fields(config)}
        title = f"{recipe}, {config.model}, {options.nproc} x {options.device_kind}: memory over one step, by owner"
        json, png = (options.save / f"simulation.{kind}" for kind in ("json", "png"))
        save(about, simulations, memories, times, title, json, png)
    if too_large := next((memory for memory in memories if memory.is_too_large), None):
        simulated = partial(simulate, rank=too_large.rank, **world)
        print(_advice(recipe, config, recipe_config, options, simulated), file=sys.stderr)
    return 1 if too_large else 0


def ranks_of(recipe: str, config: RunConfig, options: SimulateOptions) -> list[int]:
    """Return the ranks that --rank names, or raise ConfigError for one that the world does not have."""
    if options.rank == "stages":
        if "pp" not in get(recipe).axes:
            fix = f"name ranks, or use {names_with(lambda row: 'pp' in row.axes)}"
            raise ConfigError(f"{recipe} has no pipeline stages", "in --rank", fix)
        from gptscale.launchers.run.preflight import mesh_of

        return mesh_of(recipe, config, options.nproc).ranks("pp")
    words = ranks_named(options.rank, options.nproc, "stages")
    return [options.nproc - 1 if word == "last" else int(word) for word in words]


def _advice(
    recipe: str, config: RunConfig, own: RecipeConfig, options: SimulateOptions, run: Callable[..., Simulation]
) -> str:
    """Return which options make the rank fit, found by simulating them in turn."""
    tried = []
    for words, other, less, less_recipe in islice(remedies(recipe, config, own, options.nproc), TRIES):
        with console(stderr=True).status(f"trying {words}"):
            try:
                memory = run(other, less, less_recipe).memory(options.host_capacity())
            except ConfigError:
                continue
        if memory.fits:
            return f"fits with {words}: {memory.needed / GIB:.2f} GiB needed (simulated)"
        tried.append(words)
    return f"does not fit with any of: {'; '.join(tried)}"


# Strategies that hold less on each device, in turn. A world of one has nothing to split, but a host beside it.
SPLITS = ("fsdp", "zero_offload")
# How many of the remedies are worth a simulation each.
TRIES = 5


def remedies(
    recipe: str, config: RunConfig, recipe_config: RecipeConfig, nproc: int
) -> Iterator[tuple[str, str, RunConfig, RecipeConfig]]:
    """Yield ways to need less: the words to add to the command, and the recipe with its options.

    The global batch stays as it is: a smaller micro-batch is made up for by accumulation.
    """
    less = dataclasses.replace
    full: dict[str, Any] = {"activation_checkpointing": "full"}
    small: dict[str, Any] = {"micro_batch_size": 1, "grad_accum_steps": None}
    ways = {"--activation-checkpointing full": full} if config.activation_checkpointing != "full" else {}
    ways |= {"--micro-batch-size 1": small} if config.micro_batch_size != 1 else {}
    ways |= {" ".join(ways): {**full, **small}} if len(ways) == 2 else {}
    for words, changes in ways.items():
        yield words, recipe, less(config, **changes), recipe_config
    for other in SPLITS:
        if other == recipe or (nproc == 1 and other == "fsdp") or "dp" not in (get(recipe).axes or ("dp",)):
            continue
        try:
            options = default_recipe_config(other)
        except ConfigError:
            continue
        precision = "bf16" if config.precision == "fp8" else config.precision
        plain = less(config, **full, **small, precision=precision, optimizer_state="fp32")
        yield f"recipe {other} --activation-checkpointing full --micro-batch-size 1", other, plain, options
