"""The torch engine: the random numbers of its dropout, and gradients that wait for the last micro-batch."""

from dataclasses import replace

from gptscale.common.engines.torch_engine import holding_back
from gptscale.common.process.world import World
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get


def test_a_step_drops_by_its_number_and_the_rank_alone(tmp_path):
    words = ["--dropout", "0.5", "--data", "synthetic", "--seq-len", "16", "--n-layer", "1", "--out", str(tmp_path)]
    plan = preflight("single", *parse_run("single", words), World.from_environment("cpu"))
    batch = plan.batches(plan.train, 0, 1).batch(0)

    def loss(step, rank):
        world = replace(plan.run.world, rank=rank)
        engine = get("single").load().build(replace(plan.run, world=world), plan.recipe_config)
        return engine.train_step(batch._replace(step=step), 0.0).loss.item()

    assert loss(0, 0) == loss(0, 0)
    assert len({loss(0, 0), loss(1, 0), loss(0, 1)}) == 3


def test_gradients_are_held_back_until_the_last_micro_batch():
    calls = []

    class NoSync:
        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *error):
            calls.append("exit")

    set_grad_sync = holding_back(NoSync)
    for on in (False, False, True):
        set_grad_sync(on)
        calls.append(on)
    assert calls == ["enter", False, "exit", "enter", False, "exit", True]
