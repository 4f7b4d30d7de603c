"""What a run says of text: bits per byte whatever the tokenizer, and continuations that people can read."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from table_rows import rows

from gptscale.common.data.sources import Array
from gptscale.launchers.cli import main
from gptscale.launchers.run import samples

WORDS = (
    "--steps 3 --eval-every 2 --eval-batches 2 --timing-warmup-steps 0 --device cpu --seq-len 32 --n-layer 2".split()
)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("import os\nimport sys\n# \u00e9t\u00e9\n" * 400)
    return str(path)


@pytest.mark.world
def test_equal_weights_say_the_same_after_any_recipe(text, tmp_path, capfd):
    said = []
    for recipe, nproc in (("single", "1"), ("fsdp", "2"), ("tensor_parallel", "2"), ("pipeline", "2")):
        words = ["--nproc", nproc, "--data", text, "--save-last", "--sample", "2", "--out", str(tmp_path / recipe)]
        assert main(["run", recipe, *WORDS, *words, "--lr", "1e-3"]) == 0
        said.append([line for line in capfd.readouterr().out.splitlines() if line.startswith("    ")])
    assert [line.split()[0] for line in said[0]] == ["text", "likeliest", "drawn"] * 2
    assert all(lines == said[0] for lines in said)
    (row,) = rows(tmp_path / "single" / "summary.csv")
    assert float(row["bits_per_byte"]) == pytest.approx(float(row["eval_loss"]) / math.log(2))


def test_a_sequence_of_one_token_is_not_continued(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(samples, "Reader", lambda path: None)
    monkeypatch.setattr(samples, "whole_model", lambda reader, shape: None)
    config = SimpleNamespace(tokenizer="bytes", steps=1, sample=1, seed=0)
    run = SimpleNamespace(config=config, seq_len=1, gpt=None)
    held_out = Array(np.array([65, 66], dtype=np.uint16), 257, "text.txt")
    samples.print_samples(SimpleNamespace(run=run, held_out=held_out), tmp_path)
    assert [line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]] == [["'A'"], ["''"], ["''"]]


def test_continuations_are_the_likeliest_or_drawn():
    def model(ids):
        """The next id is the last one plus 1, with a tenth of a chance of plus 2."""
        logits = torch.full((*ids.shape, 10), -math.inf)
        logits.scatter_(2, ((ids + 1) % 10)[..., None], math.log(0.9))
        return logits.scatter_(2, ((ids + 2) % 10)[..., None], math.log(0.1))

    prompts = torch.tensor([[3, 4], [7, 8]])
    assert samples.continuation(model, prompts, 4, None).tolist() == [[5, 6, 7, 8], [9, 0, 1, 2]]
    drawn, again = (samples.continuation(model, prompts, 400, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(drawn, again)
    steps = torch.diff(drawn, dim=1) % 10
    assert set(steps.unique().tolist()) == {1, 2}
    assert (steps == 2).float().mean() == pytest.approx(0.1, abs=0.04)
