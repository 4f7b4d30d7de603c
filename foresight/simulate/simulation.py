"""Start a simulated rank under the mock of CUDA as a process of its own, and read what it leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.common.process import environments
from gptscale.common.process.task import pass_on, reason
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.memory.constants import outside_of_torch
from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.memory.saved import load_timeline
from gptscale.foresight.memory.timeline import Timeline
from gptscale.foresight.mock_cuda.boot import environment_of
from gptscale.foresight.mock_cuda.build import prepare
from gptscale.foresight.mock_cuda.calls import StepCalls, last_step
from gptscale.foresight.mock_cuda.devices import device_named, environment
from gptscale.foresight.mock_cuda.library import read_calls
from gptscale.launchers.run.options import option_words
from gptscale.recipes import get

LIMIT_S = 900
OOM_EXIT_STATUS = 7
# A call that torch knows of, and one that a library looks up by its name.
LACKS = re.compile(r"(?:the program called (?=\w+, which the mock lacks)|undefined symbol: )(\w+)")


@dataclass(frozen=True)
class Simulation:
    """One rank's memory, and what one step asks of its device.

    facts: what foresight/simulate/simulated.py leaves, in bytes. calls: None if no step ended.
    """

    facts: dict[str, Any]
    timeline: Timeline
    calls: StepCalls | None

    @property
    def out_of_memory(self) -> str | None:
        """Return the allocator's message if the rank ran out of memory."""
        message: str | None = self.facts.get("out_of_memory")
        return message


def simulate(
    recipe: str,
    config: RunConfig,
    recipe_config: RecipeConfig,
    *,
    device: str,
    rank: int,
    world_size: int,
    ranks_per_node: int,
) -> Simulation:
    """Run `rank` of a world of `world_size` under the mock, and return what it needs.

    device: a name of common/measure/gpus.py. Raises ConfigError if the run is refused, and GptscaleError
    if it fails under the mock.
    """
    row = get(recipe)
    variables = mock_variables(row.environment, device, min(ranks_per_node, world_size))
    with tempfile.TemporaryDirectory(prefix="gptscale-simulation-") as name:
        folder = Path(name)
        config = dataclasses.replace(config, device="cuda", out=folder / "out", tensorboard=False, run_name=None)
        words = [recipe, *option_words(recipe, config, recipe_config)]
        command = [
            environments.python(row.environment),
            "-W",
            "ignore",
            "-m",
            "gptscale.foresight.simulate.simulated",
            name,
            *words,
        ]
        environ = {**os.environ, **variables, **environment_of(rank, world_size, ranks_per_node)}
        try:
            ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            what = f"the simulation took more than {LIMIT_S} s"
            raise GptscaleError(what, f"in {recipe}", "simulate fewer layers") from None
        if ended.returncode not in (0, OOM_EXIT_STATUS):
            _refuse(recipe, ended)
        facts = json.loads((folder / "facts.json").read_text())
        calls = read_calls(folder / "calls.tsv")
        try:
            step = last_step(calls)
        except ValueError:
            step = None
        return Simulation(facts, load_timeline(folder / "timeline.npz"), step)


def rank_memory(simulation: Simulation, rank: int) -> RankMemory:
    """Return the memory of a simulated rank, with what lies on its device beside torch's allocator."""
    facts = simulation.facts
    return RankMemory(
        rank,
        simulation.timeline,
        facts["peak_allocated"],
        facts["peak_reserved"],
        facts["device_memory"],
        facts["peak_pinned"],
        facts["peak_host"],
        outside_of_torch(facts["communicators"]),
        simulation.out_of_memory,
        {
            "device": facts["device"],
            "host_s": facts.get("host_s"),
            "closed_form_bytes": facts["closed_form_bytes"],
            "step": simulation.calls.as_json() if simulation.calls else None,
            "calls": simulation.calls,
        },
    )


def mock_variables(environment_name: str, device: str, devices: int) -> dict[str, str]:
    """Return the variables under which a program of an environment sees `devices` devices of a name of common/measure/gpus.py."""
    version = cuda_version(_torch_folder(environment_name))
    return environment(device_named(device), prepare_mock(environment_name), devices, version)


def prepare_mock(environment: str) -> Path:
    """Compile the mock for the torch of an environment, unless that was done, and return its library."""
    return prepare(_torch_folder(environment) / "lib")


def _refuse(recipe: str, ended: subprocess.CompletedProcess[str]) -> None:
    """Raise the error of a simulated process in this one."""
    own = re.search(r"^gptscale: error: (.*), (in .*|at .*), (.*)$", ended.stderr, re.MULTILINE)
    if ended.returncode == 2 and own:
        raise ConfigError(*own.groups())
    if lacks := LACKS.search(ended.stderr):
        raise GptscaleError(
            f"{recipe} calls {lacks[1]}, which the mock of CUDA lacks", "in gptscale simulate", "use another option"
        )
    pass_on(ended.stderr)
    raise GptscaleError(
        f"{recipe} failed under the mock ({reason(ended.stderr)[:200]})", "in gptscale simulate", "see above"
    )


def _torch_folder(environment: str) -> Path:
    """Return the folder of the torch of an environment, or raise ConfigError without one that has CUDA."""
    if environments.is_inside(environment):
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            raise ConfigError("torch is not installed", f"at {sys.prefix}", "pip install torch")
        folder = Path(spec.origin).parent
    else:
        sites = (environments.folder(environment) / "lib").glob("python3.*/site-packages/torch")
        torch_folder = next(sites, None)
        if torch_folder is None:
            where = f"at {environments.folder(environment)}"
            raise ConfigError(f"the environment of {environment} is missing", where, f"make {environment}")
        folder = torch_folder
    return with_cuda(folder)


def with_cuda(torch_folder: Path) -> Path:
    """Return the folder of a torch, or raise ConfigError if it was built without CUDA."""
    if not (torch_folder / "lib" / "libtorch_cuda.so").exists():
        raise ConfigError(
            "this torch was built without CUDA", f"at {torch_folder}", "pip install torch, as PyPI has it"
        )
    return torch_folder


def cuda_version(torch_folder: Path) -> int:
    """Return the CUDA version that a torch was built for, as CUDA counts it: 13000 for 13.0."""
    version = re.search(r"^cuda\b.*= '(\d+)\.(\d+)", (torch_folder / "version.py").read_text(), re.MULTILINE)
    return 1000 * int(version[1]) + 10 * int(version[2]) if version else 13000
