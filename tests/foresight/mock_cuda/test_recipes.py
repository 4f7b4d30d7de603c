"""Every recipe under the mock of CUDA: all of its CUDA code runs, from the first rank to the last."""

import pytest

from gptscale.common.errors import StorageError
from gptscale.foresight.simulate.answer import times_of
from gptscale.recipes import RECIPES

TINY = ("--model", "tiny", "--n-layer", "8")
SIZES = {
    "colossal_tensor": ("--tp-size", "4"),
    # Flash attention computes in 16 bits.
    "context_parallel": ("--cp-size", "4", "--precision", "bf16"),
    "colossal_pipeline": ("--pp-size", "4"),
    "hybrid_3d": ("--tp-size", "2", "--pp-size", "4"),
    # Its own work reads other data than `single` saved.
    "handout": ("--same-work",),
}
WORLD_SIZES = {"single": 1, "tensor_parallel": 4, "pipeline": 4}
WORK = ("--steps", "4", "--save-every", "2", "--eval-every", "2", "--eval-batches", "1", "--run-name", "run")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_to_its_end(recipe, simulated):
    words = (*TINY, *SIZES.get(recipe, ()))
    status, simulation, log = simulated(recipe, *words, world_size=WORLD_SIZES.get(recipe, 8))
    assert status == 0, log[-3000:]
    facts, memory, peak = simulation.facts, simulation.memory(), simulation.timeline.peak
    assert facts["device"] == "mock of NVIDIA H100 80GB HBM3"
    assert 2**20 < memory.allocated <= memory.reserved <= facts["taken"] < 2**30
    assert peak == pytest.approx(memory.allocated, rel=0.02)
    # Blocks that another stream still uses were given back, and are not yet free: three of a pipeline's messages.
    assert facts["events"] == pytest.approx(simulation.timeline.times, abs=3)
    on_device = sum(facts["state"][kind] for kind in ("weights", "gradients", "optimizer"))
    assert on_device + facts["state"]["host"] + facts["state"]["disk"] > 0
    assert on_device <= peak
    # It is priced: no kernel is unknown but those of libraries that torch does not dispatch.
    (time,) = times_of([simulation], "h100-80", 8).values()
    assert sum(time.busy.values()) > 0
    assert sum(time.guessed.values()) < 50, time.guessed


STAGES, SHARDED = ("pipeline", "colossal_pipeline"), ("fsdp", "zero3", "hybrid_3d", "colossal_gemini")
# A stage in the middle, the last one, and the last rank of many.
OTHER_RANKS = [(recipe, rank, 8, ("--pp-size", "8")) for recipe in STAGES for rank in (3, 7)]
OTHER_RANKS += [(recipe, 63, 64, ("--global-batch-size", "128", *SIZES.get(recipe, ()))) for recipe in SHARDED]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "rank", "world_size", "words"), OTHER_RANKS)
def test_a_rank_that_is_not_the_first(recipe, rank, world_size, words, simulated):
    status, simulation, log = simulated(recipe, *TINY, *words, rank=rank, world_size=world_size)
    assert status == 0, log[-3000:]
    assert (simulation.facts["rank"], simulation.facts["world_size"]) == (rank, world_size)


@pytest.mark.slow
def test_state_on_the_host_is_counted_and_not_touched(simulated):
    """AdamW of 1.6 billion weights on the host of one rank: 25 GB, which no machine needs to have."""
    status, simulation, log = simulated("zero_offload", "--model", "1.6b", "--global-batch-size", "2", world_size=1)
    assert status == 0, log[-3000:]
    assert simulation.facts["host"] + simulation.facts["pinned"] > 12 * 1_557_611_200


def test_out_of_memory_happens_as_it_would(simulated):
    status, simulation, log = simulated("single", "--model", "1.6b", "--n-layer", "240", world_size=1)
    assert status == 1, log[-3000:]
    facts, timeline = simulation.facts, simulation.timeline
    assert "CUDA out of memory" in facts["error"]
    assert len(facts["refused_bytes"]) > 0
    assert facts["taken"] <= facts["device_memory"]
    assert sum(timeline.by_owner(timeline.peak_at).values()) == timeline.peak


@pytest.fixture(scope="module")
def train(under_mock):
    """Return a function that does all that a worker does: it trains, evaluates and saves. Only its row is refused."""

    def run(recipe, *words):
        # A block for each of 4 stages.
        words = ("--model", "tiny", "--n-layer", "4", *SIZES.get(recipe, ()), *WORK, *words)
        status, folder = under_mock("run", recipe, *words, world_size=WORLD_SIZES.get(recipe, 8))
        log = (folder / "log").read_text()
        assert "CUDA is a mock, and its figures are none" in log, log[-3000:]
        assert status == StorageError.exit_status, log[-3000:]
        assert not list(folder.rglob("summary.csv"))
        return folder / "out" / "runs" / "run" / "checkpoints", log

    return run


@pytest.fixture(scope="module")
def saved(train):
    checkpoints, log = train("single")
    assert "resumed from" not in log
    assert {path.name for path in checkpoints.iterdir()} == {"step-2", "step-4"}
    return checkpoints / "step-2"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_saves_and_another_goes_on(recipe, train, saved):
    checkpoints, log = train(recipe, "--resume", str(saved))
    assert "resumed from" in log
    assert {path.name for path in checkpoints.iterdir()} == {"step-4"}
