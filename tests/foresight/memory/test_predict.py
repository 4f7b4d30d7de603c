"""The closed form of every recipe and mesh: state to the byte, and the peak, beside the count of a lone rank."""

import pytest

from gptscale.common.engines.colossal.weights import CUT_DIMS
from gptscale.common.engines.rank_shapes import CUT_BY_TENSOR_RANKS
from gptscale.common.errors import ConfigError
from gptscale.foresight.memory.closed_form import predict
from gptscale.foresight.memory.fake_world import fake_world
from gptscale.foresight.memory.world_bytes import LAYOUTS
from gptscale.foresight.simulate.simulated_cpu import planned_words, simulate
from gptscale.launchers.bench.memory.counted import count, facts_of
from gptscale.launchers.cli import main
from gptscale.recipes import RECIPES

pytestmark = pytest.mark.slow

SHAPE = "--n-layer 4 --n-head 4 --n-embd 64 --seq-len 64 --global-batch-size 16".split()
# Of tiny models, where a block's buffers are a large part of all. Both are far less for models that people train.
TOLERANCE = 0.06
CASES = [
    ("ddp", 2, 0, []),
    ("ddp", 4, 3, ["--activation-checkpointing", "full"]),
    ("fsdp", 4, 3, []),
    # Rows that 3 does not divide are padded.
    ("fsdp", 3, 2, ["--n-embd", "96", "--global-batch-size", "15"]),
    ("fairscale_sdp", 2, 1, []),
    ("tensor_parallel", 4, 1, []),
    ("pipeline", 4, 0, ["--grad-accum-steps", "8"]),
    ("pipeline", 4, 3, ["--grad-accum-steps", "8"]),
    ("hybrid_3d", 4, 3, ["--tp-size", "2"]),
    ("ddp", 2, 1, ["--optimizer-state", "8bit", "--n-embd", "128"]),
]


@pytest.mark.parametrize(("recipe", "nproc", "rank", "words"), CASES)
def test_state_is_exact_and_the_peak_is_near(recipe, nproc, rank, words, tmp_path):
    with fake_world(rank, nproc) as world:
        counted = facts_of(count((recipe, [*SHAPE, *words]), world, tmp_path))
    predicted = predict(*planned_words(recipe, [*SHAPE, *words], nproc, rank))
    for owner, name in (("parameter", "parameters"), ("optimizer state", "optimizer_state")):
        assert predicted[owner] == counted[name]
    assert sum(predicted.values()) == pytest.approx(counted["peak"], rel=TOLERANCE)


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


def test_sharded_state_falls_with_the_ranks_and_a_world_of_64_needs_no_process():
    peaks = [
        predict(*planned_words("fsdp", ["--model", "gpt3-13b", "--global-batch-size", str(n)], n, n - 1))
        for n in (8, 64)
    ]
    assert peaks[0]["optimizer state"] / peaks[1]["optimizer state"] == pytest.approx(8, rel=0.01)


def test_what_this_machine_cannot_count_is_arithmetic_and_says_so():
    config, recipe_config = (
        (run_and_options := planned_words("fsdp", ["--model", "gpt3-175b", "--global-batch-size", "8"], 8, 0))[
            0
        ].config,
        run_and_options[1],
    )
    memory = simulate("fsdp", config, recipe_config, 8, 0)
    assert memory.extra["grade"].startswith("closed form: to count it takes")
    assert memory.allocated == sum(memory.extra["closed_form_bytes"].values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fairscale_fsdp", "--nproc", "2"], "needs a CUDA device"),
        (["ddp", "--nproc", "2", "--rank", "2"], "no such rank"),
        (["ddp", "--compile"], "compiled blocks"),
        (["dpd"], "did you mean 'ddp'"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(words, message, capsys):
    assert main(["simulate", *words, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_run_that_does_not_fit_says_what_fills_the_memory_and_what_would_fit(capsys):
    words = "simulate ddp --nproc 2 --device cpu --how formula --model gpt2 --global-batch-size 16 --memory 6".split()
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "does not fit" in error
    assert "activation" in error
    assert "fits with --activation-checkpointing full" in error
    with pytest.raises(ConfigError):
        planned_words("ddp", ["--compile"], 2, 0)


def test_tensor_ranks_cut_the_same_dimensions_in_the_closed_form_and_in_colossal():
    """The closed form imports no torch, so it has a table of its own. Colossal-AI alone keeps the positions whole."""
    assert {"wpe.weight": 0, **CUT_DIMS} == CUT_BY_TENSOR_RANKS
