"""Fixtures of the tests of the launchers."""

import pytest

import gptscale.recipes
from gptscale.common.process.world import World
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import Recipe


@pytest.fixture
def lacking_engines(monkeypatch, tmp_path_factory):
    """Make the recipes `absent`, whose engine is not installed, and `broken`, whose engine does not import."""
    home = tmp_path_factory.mktemp("broken")
    (home / "broken_engine.py").write_text("import a_file_that_was_lost")
    (home / "broken_engine-1.0.dist-info").mkdir()
    (home / "broken_engine-1.0.dist-info" / "METADATA").write_text("Name: broken-engine\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(home)
    for name, engine in (("absent", "deepspeed-of-nowhere"), ("broken", "broken-engine")):
        row = Recipe("gptscale.recipes.single", "SingleConfig", "", "replicas", engine=engine)
        monkeypatch.setitem(gptscale.recipes.RECIPES, name, row)


@pytest.fixture
def plan(tmp_path):
    """Return a function that checks a run of one process with further options."""

    def make(*words):
        own = ["--data", "synthetic", "--n-layer", "1", "--seq-len", "32", "--out", str(tmp_path), "--run-name", "r"]
        config, recipe_config = parse_run("single", [*own, *words])
        return preflight("single", config, recipe_config, World.from_environment(config.device, config.dist_timeout_s))

    return make
