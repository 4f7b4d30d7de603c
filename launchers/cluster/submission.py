"""Handing runs to Slurm: which ranks a job has, its options, and what sbatch answers."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gptscale.common.errors import ConfigError, StorageError
from gptscale.common.process import environments
from gptscale.common.process.world import DEFAULT_TIMEOUT_S, World
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.checks import check_ranges
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.cluster.batch_script import WARNING_S, JobTask
from gptscale.launchers.run.options import option_words
from gptscale.launchers.run.preflight import check_without_device, preflight, resolve
from gptscale.recipes import get


def fit_to_nodes(
    recipe: str, config: RunConfig, recipe_config: RecipeConfig, allocation: Allocation, per_node: int
) -> RunConfig:
    """Check the run for every number of nodes that it may get, and return its options as each of its starts gets them.

    With fewer nodes the global batch and the micro-batch stay, and the accumulation grows.
    """
    if config.resume not in (None, "auto"):
        fix = "leave it out, the job resumes its own checkpoints"
        raise ConfigError(f"a job that is started again would resume {config.resume} again", "in --resume", fix)
    if allocation.gpus_per_node:
        config = dataclasses.replace(config, device="cuda")
    elif config.device == "auto":
        config = dataclasses.replace(config, device="cpu")
    if config.save_every or config.save_last:
        config = dataclasses.replace(config, resume="auto")
    fewest = allocation.min_nodes or allocation.nodes
    if fewest < allocation.nodes:
        if not get(recipe).axes:
            raise ConfigError(f"{recipe} is one process", "in --min-nodes", "leave it out")
        if not config.resume:
            raise ConfigError("the run saves nothing to go on from", "in --min-nodes", "add --save-every N")
        batch = resolve(recipe, config, recipe_config, _world(config, allocation.nodes * per_node)).batch
        sizes = {name: getattr(batch, name) for name in ("global_batch_size", "micro_batch_size")}
        config = dataclasses.replace(config, **sizes, grad_accum_steps=None)
    for nodes in range(allocation.nodes, fewest - 1, -1):
        world = _world(config, nodes * per_node if get(recipe).axes else 1)
        try:
            if world.device.type == "cuda" and not torch.cuda.is_available():
                # A login node often has no GPU. What depends on one is checked when the job starts.
                check_without_device(resolve(recipe, config, recipe_config, world), recipe_config)
            else:
                preflight(recipe, config, recipe_config, world)
        except ConfigError as error:
            if nodes == allocation.nodes:
                raise
            fewer = f"use --min-nodes {nodes + 1}" if nodes + 1 < allocation.nodes else "leave it out"
            raise ConfigError(f"on {nodes} of the nodes {error.what}", "in --min-nodes", fewer) from None
    return config


def _world(config: RunConfig, world_size: int) -> World:
    device = torch.device(config.device)
    return World(0, 0, world_size, device, config.dist_timeout_s or DEFAULT_TIMEOUT_S[device.type])


def job_task(recipe: str, config: RunConfig, recipe_config: RecipeConfig, per_node: int) -> JobTask:
    """Return a run as a task of a job. A recipe that splits nothing takes one rank on one node."""
    row = get(recipe)
    words = [environments.python(row.environment), "-u", "-Pm", "gptscale.recipes", recipe]
    words += option_words(recipe, config, recipe_config)
    folder = config.out / "runs" / str(config.run_name)
    return JobTask(folder, words, per_node if row.axes else 1, 0 if row.axes else 1)


def directives(
    name: str, allocation: Allocation, per_node: int, log: Path, sbatch: Sequence[str], *, requeue: bool
) -> list[str]:
    """Return the options of sbatch for a job: our own, and the user's, which replace ours of the same name."""
    fewest = allocation.min_nodes or allocation.nodes
    users = {word.partition("=")[0] for word in sbatch}
    own = {"--job-name": name, "--nodes": str(allocation.nodes), "--ntasks-per-node": str(per_node)}
    if fewest < allocation.nodes:
        # Told of tasks, Slurm would take the fewest nodes that hold those of the fewest nodes.
        own = {"--job-name": name, "--nodes": f"{fewest}-{allocation.nodes}"}
        sbatch = [*sbatch, *({"--exclusive"} - users)]
    own |= {
        "--output": str(log),
        # A job that is started again goes on in its log.
        "--open-mode": "append",
        "--signal": f"B:TERM@{WARNING_S}",
    }
    if allocation.gpus_per_node:
        own["--gpus-per-node"] = str(allocation.gpus_per_node)
    own_options = [f"{option}={value}" for option, value in own.items() if option not in users]
    return [*own_options, *sbatch, "--requeue" if requeue else "--no-requeue"]


def submit(script: str, file: Path, *words: str) -> str:
    """Write a script, hand it to sbatch, with `words` as further options, and return the number of the job."""
    if shutil.which("sbatch") is None:
        fix = "submit from a login node of the cluster, or print the script with --dry-run"
        raise ConfigError("there is no sbatch", "on this machine", fix)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(script)
    except OSError as error:
        raise StorageError(error.strerror or str(error), f"in {file}", "point --out elsewhere") from None
    command = ["sbatch", "--parsable", *words, str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = ended.stderr.splitlines() or ["it said nothing"]
        what = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines[:2])
        raise ConfigError(f"sbatch refuses the job ({what[:240]})", f"in {shlex.join(command)}", "change what it names")
    return ended.stdout.strip().partition(";")[0]


# Options of sbatch that are handed on as they are. All but the last few have a value.
SBATCH = frozenset(
    "account begin comment constraint cpus-per-gpu cpus-per-task dependency exclude gres hint job-name licenses mail-type "
    "mail-user mem mem-per-cpu mem-per-gpu network nice nodelist output partition priority qos reservation signal switches "
    "time time-min tmp wckey".split()
)
SBATCH_FLAGS = frozenset(["exclusive", "hold", "oversubscribe"])


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job."""

    nodes: int = 1
    """Nodes of the job."""
    min_nodes: int | None = None
    """Go on with as few nodes as this when others are gone: the same global batch, with more accumulation. Default --nodes."""
    gpus_per_node: int | None = None
    """GPUs on each node, and as many ranks. Without it the run is on CPUs."""

    def __post_init__(self) -> None:
        check_ranges(self, {"nodes": (1, 4096), "min_nodes": (1, self.nodes), "gpus_per_node": (1, 64)})


def split_sbatch(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of sbatch in a command line, each as one word `--name=value`, and the other words."""
    sbatch, others, words = [], [], iter(argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in SBATCH | SBATCH_FLAGS:
            others.append(word)
            continue
        if name in SBATCH and not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ConfigError(f"--{name} has no value", "in the options of sbatch", f"give --{name}=VALUE")
        if not value.isprintable():
            raise ConfigError(f"--{name} has a value of several lines", "in the options of sbatch", "give one line")
        sbatch.append(f"--{name}={value}" if value else f"--{name}")
    return sbatch, others
