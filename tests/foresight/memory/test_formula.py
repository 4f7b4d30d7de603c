"""The formula of each recipe's docstring, in letters and in numbers."""

import inspect
import re
from types import SimpleNamespace

import pytest
from planned_runs import planned_words

from gptscale.common.engines.rank_shapes import state_formula
from gptscale.recipes import RECIPES, get

N = 842_624
H, L = 128, 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_docstring_has_the_formula(recipe):
    module = pytest.importorskip(RECIPES[recipe].module)
    config = getattr(module, RECIPES[recipe].config)(**RECIPES[recipe].preset)
    run = planned_words("ddp", [], 2, 0)[0]
    (memory,) = re.findall(r"(?s)Memory per device +(.*?)\n(?=\S)", inspect.getdoc(module))
    assert config.state_formula(run) in re.sub(r"\s+", " ", memory)


@pytest.mark.parametrize(
    ("recipe", "words", "formula", "nbytes"),
    [
        ("single", (), "16 N", 16 * N),
        ("fsdp", (), "16 N / d", 8 * N),
        ("context_parallel", ("--cp-size", "2"), "16 N / (d c)", 8 * N),
        ("zero2", (), "b N + (12 + 4) N / d", 12 * N),
        ("zero3", ("--precision", "bf16"), "(b + 12 + 4) N / d", 9 * N),
        ("zero1", ("--precision", "bf16"), "b N + 12 N / d + (4 + b) N", 14 * N),
        ("zero_offload", ("--precision", "bf16"), "b N + (12 + 4 + 4) N / d", 12 * N),
        ("zero_offload", ("--stage", "3", "--precision", "bf16"), "(b + 12 + 4 + 4) N / d", 11 * N),
        ("zero_infinity", ("--precision", "bf16"), "(b + 12 + 4) N / d", 9 * N),
        ("tensor_parallel", (), "16 N / t + 16 (6 L + 2) h (t - 1) / t", 8 * N + 8 * (6 * L + 2) * H),
        # The group of shards is what divides: each of two has two of four ranks.
        ("fsdp", ("--dp-replicate-size", "2"), "16 N 2 / d", 8 * N),
        # The heaviest stage counts: the first has two blocks and both tables.
        ("pipeline", ("--n-layer", "4"), "16 n", 16 * (2 * (12 * H**2 + 13 * H) + 384 * H + 128 * H)),
        # Another optimizer has no formula.
        ("ddp", ("--optimizer", "sgd", "--lr", "0.1"), None, None),
        ("ddp", ("--optimizer-state", "8bit"), None, None),
    ],
)
def test_letters_become_numbers(recipe, words, formula, nbytes):
    nproc = 4 if "--dp-replicate-size" in words else 2 if get(recipe).axes else 1
    found = state_formula(*planned_words(recipe, list(words), nproc, 0))
    assert found == (formula and (formula, nbytes))


def test_a_fraction_of_gemini_has_none():
    run, _ = planned_words("ddp", [], 2, 0)
    assert state_formula(run, SimpleNamespace(state_formula=lambda run: "")) is None
