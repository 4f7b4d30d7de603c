"""The contract of a recipe module, checked for every row of the table."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
from worlds import gptscale

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
    """Check that the docstring has every heading, that the module has 35 to 150 lines, and the order of its parts."""
    module = pytest.importorskip(module_name)
    for heading in ("What is sharded", "What is communicated", "Memory per device", "Wins", "Loses", "Source"):
        assert heading in module.__doc__, heading
    lines = inspect.getsource(module).splitlines()
    assert 35 <= len(lines) <= 150
    order = [line.split("(")[0].split(":")[0] for line in lines if line.startswith(("class ", "def "))]
    expected = [w for w in (order[0], "def shard", "def build") if w in order]
    assert [w for w in order if w in expected] == expected


def recipes_by_hand(*words):
    return gptscale(*words, module="gptscale.recipes")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "unknown recipe '', on the command line, use one of: single ddp fsdp"),
        (["zero2000"], "unknown recipe 'zero2000', on the command line, did you mean 'zero2'?"),
        (["fsdp_offload", "--no-cpu-offload"], "fsdp_offload fixes cpu_offload True, in --cpu-offload, leave it out"),
    ],
)
def test_by_hand_a_wrong_name_or_option_is_one_line(words, message):
    ended = recipes_by_hand(*words)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"gptscale: error: {message}")
    assert ended.stderr.count("\n") == 1


def test_by_hand_a_preset_row_starts_by_its_name():
    ended = recipes_by_hand("fsdp_offload", "--help")
    assert ended.returncode == 0
    assert "usage: gptscale run fsdp_offload" in ended.stdout
    assert "--cpu-offload" in ended.stdout


def test_a_torch_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr("gptscale.recipes.installed", lambda distribution: "2.6.0+cpu")
    get("ddp").check_installed()
    with pytest.raises(ConfigError, match=r"fsdp needs torch>=2\.7, not 2\.6\.0"):
        get("fsdp_offload").load()


def test_the_contract_stays_small():
    import gptscale.common.engine as engine

    lines = Path(engine.__file__).read_text().splitlines()
    assert len([line for line in lines if not line.strip().startswith("#")]) < 80
    told = "bubble close counters eval_loss live_state load_counters offload skip_steps state train_step"
    assert told.split() == METHODS


@pytest.mark.parametrize("module_name", MODULES)
def test_shard_needs_nothing_of_gptscale(module_name):
    """Check that a reader can copy the function into another project: it imports all it needs, and nothing of ours."""
    module = pytest.importorskip(module_name)
    if not hasattr(module, "shard"):
        pytest.skip("splits nothing")
    (function,) = ast.parse(inspect.getsource(module.shard)).body
    assert not [node for node in ast.walk(function) if isinstance(node, ast.ImportFrom) and "gptscale" in node.module]
    used = {name for name in module.shard.__code__.co_names if name in vars(module) and not name.startswith("__")}
    assert not used, f"shard uses {used} from its module"
