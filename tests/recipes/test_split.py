"""Tensor, pipeline and hybrid parallelism in real worlds: the same numbers as one process, in every way of splitting."""

import json

import pytest
from worlds import ok, ranks, rows

from gptscale.launchers.run.options import default_recipe_config

TOLERANCE = 1e-5


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("nproc", "n_steps"), [(2, {"adamw": 20}), (4, {"adamw": 4, "sgd": 4})])
def test_every_way_of_splitting_computes_what_one_process_computes(nproc, n_steps, tmp_path):
    """Compare each step with that of one process, in every way of splitting.

    Compared are losses and norms, under SGD final weights too, with accumulation and clipping, and an evaluation. No two
    ranks of a world draw the same dropout, and each draws the same again for the same step.
    """
    ranks("world_split.py", nproc, tmp_path, json.dumps(n_steps))
    expected = {
        " ".join([r, *way])
        for r in ("tensor_parallel", "context_parallel", "pipeline", "hybrid_3d")
        for way in default_recipe_config(r).ways(nproc)
    }
    for rank in range(nproc):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert set(found) == expected
        worst = {way: max(deviations.values()) for way, deviations in found.items()}
        assert {way: d for way, d in worst.items() if not d <= TOLERANCE} == {}
        assert all(deviations["weights"] > 0 for deviations in found.values() if "sgd" in n_steps)


def test_the_last_stage_may_hold_the_head_alone_which_tensor_ranks_cut(tmp_path):
    words = [*"--n-layer 2 --seq-len 32 --data synthetic --device cpu --steps 3 --out".split(), tmp_path]
    ok("run", "single", *words)
    ok("run", "hybrid_3d", "--nproc", 4, *words, "--tp-size", 2, "--pp-size", 2, "--layers-per-stage", "2,0")
    alone, split = (float(row["loss_last"]) for row in rows(tmp_path / "summary.csv"))
    assert split == pytest.approx(alone, rel=TOLERANCE)


@pytest.mark.parametrize("recipe", ["tensor_parallel", "pipeline"])
def test_no_rank_ever_has_the_whole_model(recipe, tmp_path):
    """Build half of gpt2 on two ranks: the resident set grows by a rank's own weights and at most one block being drawn."""
    ranks("world_rss.py", 2, recipe, tmp_path, *"--model gpt2 --vocab-size 8192 --n-layer 6 --optimizer sgd".split())
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        # In a pipeline both ends hold the table.
        assert found["held"] < 0.8 * 4 * found["n"]
        assert found["grown"] < found["held"] + 64 * 2**20 < 4 * found["n"]
