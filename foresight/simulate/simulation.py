"""A rank of a recipe under the mock of CUDA, simulated as anybody's program is, and kept for whoever asks again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.common.process import environments
from gptscale.common.process.task import pass_on
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.mock_cuda.devices import device_named
from gptscale.foresight.simulate.interpreters import torch_folder_of
from gptscale.foresight.simulate.processes import ProgramError
from gptscale.foresight.simulate.program import ProgramTask, Simulation, read_simulation, run_program
from gptscale.launchers.run.options import option_words
from gptscale.ops.build.cache import CacheFolderError, private, root
from gptscale.recipes import get

LIMIT_S = 900
# Simulations that are kept. The oldest gives way.
KEPT = 200
# The first step makes the optimizer's state, and DDP orders its buckets anew after it. The second is as all that follow.
STEPS = 2


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

    device: a name of common/measure/gpus.csv. Raises ConfigError if the run is refused, and GptscaleError if it fails under the
    mock.
    """
    environment, is_own = get(recipe).environment, config.is_own
    config = dataclasses.replace(config, device="cuda", tensorboard=False, run_name=None)
    words = ["-W", "ignore", "-Pm", "gptscale.foresight.simulate.recipe_program", recipe]
    task = ProgramTask(
        [environments.python(environment), *words, *option_words(recipe, config, recipe_config)],
        world_size,
        str(rank),
        device_named(device),
        ranks_per_node,
        STEPS,
        LIMIT_S,
        # A plan of a model of one's own is proved with values.
        share_host_memory=not (is_own and "tp" in get(recipe).axes),
        ends=False,
        torch_folder=torch_folder_of(environment),
    )
    try:
        return kept_simulation(task, config.gpt().identity if is_own else "")
    except ProgramError as error:
        pass_on(error.tail)
        what = f"{recipe} failed under the mock: {error.what}"
        raise GptscaleError(what, "in gptscale simulate", "use another option, or see above") from None


def kept_simulation(task: ProgramTask, content: str = "") -> Simulation:
    """Return what a program needs, from the simulation of the same that was kept, if there is one.

    task: with the folder of its torch. content: what tells the program from another of the same command.
    """
    assert task.torch_folder is not None
    facts = {**vars(task), "start": "", "host_limit": 0, "code": _code_hash(), "content": content}
    # The folder of a program that is text is another each time.
    facts |= {"folder": ""} if content else {}
    facts["torch"] = (task.torch_folder / "version.py").read_text()
    try:
        folder = private(root() / "simulations")
    except CacheFolderError as error:
        raise ConfigError(*error.args) from None
    kept = folder / hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()
    if kept.exists():
        kept.touch()
        return read_simulation(kept)
    with tempfile.TemporaryDirectory(dir=folder, prefix="part-") as part:
        simulation = run_program(dataclasses.replace(task, keep=Path(part)))
        # It comes into its place whole. Another process may have been as fast.
        with contextlib.suppress(OSError):
            os.rename(part, kept)
    # Another may let the same ones go just now.
    with contextlib.suppress(FileNotFoundError):
        for oldest in sorted(folder.glob("[0-9a-f]*"), key=lambda each: each.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(oldest, ignore_errors=True)
    return simulation


@functools.cache
def _code_hash() -> str:
    """Return a hash of all our code, by which a simulation is as good as new."""
    package = Path(__file__).parents[2]
    files = sorted(path for path in package.glob("[a-z]*/**/*") if path.suffix in (".py", ".c", ".csv", ".h"))
    rooms = ("common", "foresight", "launchers", "ops", "recipes")
    own = (path for path in files if path.relative_to(package).parts[0] in rooms)
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in own)).hexdigest()
