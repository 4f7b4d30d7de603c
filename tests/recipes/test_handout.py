"""The exercise's baseline: what it computes, what it refuses, and that nobody takes its work for that of the others."""

import pytest
import torch
import torch.nn.functional as F
from planned_runs import planned_words
from worlds import assert_same_state, ok, rows, steps

from gptscale.common.engine import Batch
from gptscale.common.measure.flops import handout_n_params
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.plan.enumeration import RECIPES
from gptscale.launchers.cli import main
from gptscale.launchers.run.start import recipes_named
from gptscale.recipes import handout

SHAPE = ["--n-layer", "2", "--n-embd", "32", "--n-head", "2", "--seq-len", "16", "--no-verdict"]
WORKERS = ["--workers", "2"]


def built(*words):
    run, config = planned_words("handout", [*SHAPE, "--global-batch-size", "4", *words], 1, 0)
    return run, config, handout.build(run, config)


def test_its_loss_is_that_of_transformers_own_forward():
    """transformers shifts labels inside the sequence too, and takes the mean."""
    run, config, engine = built(*WORKERS)
    batch = handout.batches(run, config, 0, 1).batch(0)
    hf = engine.model.hf.eval()
    expected = hf(input_ids=batch.inputs, labels=batch.inputs).loss
    assert engine.eval_loss(batch).item() == pytest.approx(expected.item(), rel=1e-6)


def test_it_has_transformers_dropout_unless_it_does_the_others_work():
    for words, rate in ((WORKERS, 0.1), (["--same-work", "--dropout", "0.3"], 0.3)):
        model = built(*words)[2].model.hf
        assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {rate}


def test_recomputing_blocks_changes_no_bit_and_needs_no_cache():
    losses = []
    for mode in ("none", "full"):
        _, _, engine = built("--activation-checkpointing", mode)
        assert engine.model.hf.config.use_cache == (mode == "none")
        ids = torch.arange(64).view(4, 16)
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)
        losses.append([engine.train_step(Batch(step, ids, targets), 1e-2).loss.item() for step in range(3)])
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]


def test_its_two_formulas_are_in_the_plan():
    run, config = planned_words("handout", ["--model", "1.6b"], 1, 0)
    (line,) = config.describe(run)
    assert "get_model_size 1,638,022,400" in line
    assert handout_n_params(run.gpt) == 1_638_022_400
    assert "13.1042 GFLOP per token" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dropout", "0.2"], "its own dropout, in --dropout, leave it out, or add --same-work"),
        (["--data", "book.txt"], "its own random ids and its own dropout, in --data"),
        (["--eval-every", "5"], "in --eval-every"),
        (["--same-work", "--workers", "2"], "the run's own --data is read, in --workers"),
        (["--data-size", "4"], "4 sequences are less than a global batch of 8, in --data-size, use 8 or more"),
        (["--compile"], "handout does not work with compile True"),
        (["--precision", "fp8"], "handout does not work with precision fp8"),
    ],
)
def test_what_it_would_ignore_is_refused_in_one_line(words, message, capsys, tmp_path):
    assert main(["run", "handout", "--device", "cpu", "--out", str(tmp_path), *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gptscale: error")]
    assert message in line


def test_it_is_left_out_where_all_do_the_same_work(capsys):
    own = "its ids, its dropout of 0.1 and its loss are the exercise's"
    for model, same, why in (("tiny", True, own), ("llama-tiny", False, "does not work with model llama-tiny")):
        assert "handout" not in recipes_named("all", RunConfig(model=model, device="cpu"), same_work=same)
        assert f"leaving out handout: {why}" in capsys.readouterr().err
    assert "handout" in recipes_named("all", RunConfig(device="cpu"))
    assert [name for name, row in RECIPES.items() if row.own_work] == ["handout"]


@pytest.mark.timeout(600)
def test_it_trains_resumes_and_is_compared(tmp_path):
    """A resumed run on two ranks repeats losses and final state bit for bit, and only --same-work is ranked."""
    base = [*SHAPE, *WORKERS, "--steps", "8", "--save-every", "4", "--data-size", "24", "--out", tmp_path]
    whole, again = (tmp_path / "runs" / name for name in ("whole", "again"))
    ok("run", "handout", "--nproc", 2, *base, "--run-name", "whole")
    ok("run", "handout", "--nproc", 2, *base, "--run-name", "again", "--resume", whole / "checkpoints" / "step-4")
    assert steps(whole).loss.tolist()[4:] == steps(again).loss.tolist()
    assert_same_state(*(run / "checkpoints" / "step-8" for run in (whole, again)))
    same = [*SHAPE, "--steps", "8", "--out", tmp_path]
    ok("run", "single", *same)
    ok("run", "handout", "--same-work", *same)
    ok("compare", tmp_path, "--csv", tmp_path / "c.csv")
    compared = rows(tmp_path / "c.csv")
    # The faster one is first, which may be either.
    assert {row["name"] for row in compared if row["ranked"] == "true"} == {"single x1", "handout x1"}
    (apart,) = [row["notes"] for row in compared if row["ranked"] == "false"]
    assert "dropout 0.1" in apart
    assert "loss shifted inside the sequence" in apart
