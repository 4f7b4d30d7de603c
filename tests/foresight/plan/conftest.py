"""Plans whose trials are told instead of simulated: what is checked is what they list, try, leave out and recommend."""

import pytest
from told_trials import tried

from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.plan.planner import plan
from gptscale.foresight.plan.question import gpu_cluster


@pytest.fixture
def planned():
    """Return a function that plans, with trials as `trial` tells them."""

    def planned(
        model, recipes, nodes=1, per_node=8, device="h100-80", batch=64, link=None, trial=tried, rows=20, **more
    ):
        cluster = gpu_cluster(device, nodes, per_node, link)
        config = RunConfig(model=model, global_batch_size=batch, precision="bf16", device="cuda", **more)
        return plan(config, cluster, recipes.split(","), trial, wanted=rows)

    return planned
