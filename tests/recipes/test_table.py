"""The contract of a recipe module, over the whole table."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from gptscale.common.engine import Engine
from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig
from gptscale.recipes import RECIPES, get

MODULES = sorted({recipe.module for recipe in RECIPES.values()})
METHODS = [name for name, member in inspect.getmembers(Engine, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("name", RECIPES)
def test_row_points_at_a_module_with_its_config_and_build(name):
    recipe = get(name)
    module = pytest.importorskip(recipe.module)
    config_type = getattr(module, recipe.config)
    assert issubclass(config_type, RecipeConfig)
    config = config_type(**recipe.preset)
    assert dataclasses.is_dataclass(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.anything = 1
    assert list(inspect.signature(module.build).parameters) == ["run", "config"]


@pytest.mark.parametrize("module_name", MODULES)
def test_module_reads_like_its_siblings(module_name):
    """Docstring that says what, what is sent, how much memory, when it wins and loses, source; 40 to 150 lines."""
    module = pytest.importorskip(module_name)
    for heading in ("What is sharded", "What is communicated", "Memory per device", "Wins", "Loses", "Source"):
        assert heading in module.__doc__, heading
    lines = inspect.getsource(module).splitlines()
    assert 25 <= len(lines) <= 150
    order = [line.split("(")[0].split(":")[0] for line in lines if line.startswith(("class ", "def "))]
    expected = [w for w in (order[0], "def shard", "def build") if w in order]
    assert [w for w in order if w in expected] == expected


def test_importing_the_table_loads_no_engine():
    engines = ("torch", "deepspeed", "fairscale", "accelerate")
    code = f"import sys, gptscale.recipes; print([m for m in {engines} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'fsdp'"):
        get("fspd")


def test_the_contract_stays_small():
    import gptscale.common.engine as engine

    assert len(Path(engine.__file__).read_text().splitlines()) < 80
    assert METHODS == ["bubble", "close", "counters", "eval_loss", "load_counters", "offload", "state", "train_step"]


@pytest.mark.parametrize("module_name", MODULES)
def test_shard_needs_nothing_of_gptscale(module_name):
    """What a reader copies into another project: the function and its config may name torch or the engine only."""
    module = pytest.importorskip(module_name)
    if not hasattr(module, "shard"):
        pytest.skip("splits nothing")
    names = set(module.shard.__code__.co_names)
    ours = {n for n, v in vars(module).items() if getattr(v, "__module__", "").startswith("gptscale.") and n in names}
    assert not ours
