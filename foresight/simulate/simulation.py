"""A rank of a recipe under the mock of CUDA, simulated as anybody's program is."""

from __future__ import annotations

import dataclasses

from gptscale.common.errors import GptscaleError
from gptscale.common.process import environments
from gptscale.common.process.task import pass_on
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.mock_cuda.devices import device_named
from gptscale.foresight.simulate.interpreters import torch_folder_of
from gptscale.foresight.simulate.processes import ProgramError
from gptscale.foresight.simulate.program import ProgramTask, Simulation, run_program
from gptscale.launchers.run.options import option_words
from gptscale.recipes import get

LIMIT_S = 900
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

    device: a name of common/measure/gpus.csv. Raises ConfigError if the run is refused, and GptscaleError
    if it fails under the mock.
    """
    environment = get(recipe).environment
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
        ends=False,
        torch_folder=torch_folder_of(environment),
    )
    try:
        return run_program(task)
    except ProgramError as error:
        pass_on(error.tail)
        what = f"{recipe} failed under the mock: {error.what}"
        raise GptscaleError(what, "in gptscale simulate", "use another option, or see above") from None
