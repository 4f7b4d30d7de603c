"""Fixtures of the tests of a run."""

import pytest

from gptscale.common.process.world import World
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight


@pytest.fixture
def plan(tmp_path):
    def make(*words):
        own = ["--data", "synthetic", "--out", str(tmp_path), "--run-name", "r"]
        config, recipe_config = parse_run("single", [*own, *words])
        return preflight("single", config, recipe_config, World.from_environment(config.device, config.dist_timeout_s))

    return make
