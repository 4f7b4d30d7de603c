"""The closed form of every recipe and mesh: state to the byte, and the peak, beside a rank of the mock."""

import pytest
from planned_runs import planned_words

from gptscale.foresight.memory.closed_form import predict
from gptscale.foresight.memory.world_bytes import LAYOUTS
from gptscale.foresight.simulate.simulation import simulate
from gptscale.launchers.run.options import parse_run
from gptscale.recipes import RECIPES

pytestmark = pytest.mark.slow

SHAPE = "--n-layer 4 --n-head 4 --n-embd 64 --seq-len 64 --global-batch-size 16".split()
CASES = [
    ("ddp", 4, 3, ["--activation-checkpointing", "full"]),
    ("fsdp", 4, 3, []),
    # Rows that 3 does not divide are padded.
    ("fsdp", 3, 2, ["--n-embd", "96", "--global-batch-size", "15"]),
    ("fairscale_sdp", 2, 1, []),
    ("tensor_parallel", 4, 1, []),
    ("pipeline", 4, 3, ["--grad-accum-steps", "8"]),
    ("hybrid_3d", 4, 3, ["--tp-size", "2"]),
    ("ddp", 2, 1, ["--optimizer-state", "8bit", "--n-embd", "128"]),
]


@pytest.mark.parametrize(("recipe", "nproc", "rank", "words"), CASES)
def test_state_is_what_a_rank_of_the_mock_holds(recipe, nproc, rank, words):
    config, recipe_config = parse_run(recipe, [*SHAPE, *words, "--data", "synthetic"])
    place = {"rank": rank, "world_size": nproc, "ranks_per_node": 8}
    facts = simulate(recipe, config, recipe_config, device="h100-80", **place).facts
    predicted = predict(*planned_words(recipe, [*SHAPE, *words], nproc, rank))
    state = facts["state"]
    assert (predicted["parameter"], predicted["optimizer state"]) == (state["weights"], state["optimizer"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_layout_and_more_memory_for_more_tokens(recipe):
    assert RECIPES[recipe].memory in LAYOUTS
    if RECIPES[recipe].needs_cuda or RECIPES[recipe].environment:
        pytest.skip("cannot be planned without its device or its environment")
    nproc = 2 if RECIPES[recipe].axes else 1
    peaks = []
    for sequences in (8, 32, 128):
        words = [*SHAPE, "--n-embd", "512", "--n-head", "8", "--global-batch-size", str(sequences)]
        words += ["--grad-accum-steps", "4"] if "pp" in RECIPES[recipe].axes else []
        peaks.append(sum(predict(*planned_words(recipe, words, nproc, 0)).values()))
    assert peaks == sorted(set(peaks))


def test_sharded_state_falls_with_the_ranks():
    peaks = [
        predict(*planned_words("fsdp", ["--model", "gpt3-13b", "--global-batch-size", str(n)], n, n - 1))
        for n in (8, 64)
    ]
    assert peaks[0]["optimizer state"] / peaks[1]["optimizer state"] == pytest.approx(8, rel=0.01)
