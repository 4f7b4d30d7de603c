"""`gptscale prove`: programs of others that are right, and the same with a bug that somebody reported."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from benchmarks.foresight.prove import ALSO, CAUSES, Forks
from gptscale.foresight.prove.answer import answer
from gptscale.foresight.prove.causes import alike, factor, finding, words
from gptscale.foresight.prove.compare import HeldPart, Proof, Whole
from gptscale.foresight.prove.program import RESHAPED
from gptscale.launchers.cli import main

PROGRAMS = Path(__file__).parent / "programs"
TRAIN = PROGRAMS / "train.py"
TORCHRUN = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2"


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.process.kill()


@pytest.fixture(scope="module")
def compared(forks):
    """Return a function that compares an engine with one process."""
    references = {}

    def compare(engine, words="", bug=""):
        if words not in references:
            references[words] = forks.record(f"reference-{len(references)}", None, 1, f"{words} --batch 8")
        name = f"{engine}-{words}-{bug}".replace(" ", "-")
        return Proof(references[words], forks.candidate(name, references[words], engine, words, bug), 3, None)

    return compare


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("ddp", "--clip 0.5"),
        ("plain", "--accumulate 2"),
        ("plain", "--two"),
        ("fsdp1", ""),
        ("fsdp1", "--optimizer SGD"),
        ("fsdp2", "--clip 0.5"),
        ("accelerate", "--tie"),
        ("fabric", "--seed 1 --freeze"),
        ("tensor", "--accumulate 2"),
        ("pipeline", "--tie"),
        ("pipeline", "--accumulate 2 --tie"),
        ("ddp", "--pad"),
        ("ddp", "--bf16"),
        ("zero2", "--clip 0.5"),
        ("zero3", ""),
        ("ddp", "--compile"),
        ("ddp", "--optimizer Own"),
        ("trainer", "--clip 0.5"),
        ("lightning", "--accumulate 2"),
        ("sharded", ""),
        ("redundancy", ""),
        ("fsdp2@4", ""),
        ("tensor@4", ""),
    ],
)
def test_a_right_program_is_called_right(compared, engine, words):
    comparison = compared(engine, words)
    assert not comparison.differences
    assert max(comparison.worst.values()) <= (6e-2 if "bf16" in words else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "engine", "words"),
    [
        ("no-reduce", "ddp", ""),
        ("sum", "plain", ""),
        ("divided-twice", "plain", ""),
        ("wrong-group", "plain", ""),
        ("local-norm", "fsdp2", "--clip 0.05"),
        ("norm-by-root", "fsdp2", "--clip 0.05"),
        ("norm-omits", "ddp", "--clip 0.05"),
        ("tied", "pipeline", "--tie"),
        ("accumulation", "accelerate", "--accumulate 2"),
        ("accumulation", "pipeline", "--accumulate 2 --tie"),
        ("late-clear", "fabric", ""),
        ("stale", "plain", ""),
        ("same-batch", "ddp", ""),
        ("padding", "ddp", "--pad"),
        ("skipped", "plain", ""),
        ("zero", "fsdp2", ""),
        ("half-zero", "tensor", ""),
        ("not-held", "ddp", ""),
        ("no-broadcast", "plain", ""),
        ("rate", "fsdp1", ""),
        ("drift", "ddp", "--clip 0.05"),
        ("late-clear", "lightning", ""),
        ("half-zero", "tensor@4", ""),
    ],
)
def test_a_planted_bug_is_found_and_named(compared, bug, engine, words):
    comparison = compared(engine, words, bug)
    assert comparison.differences
    assert finding(comparison, comparison.differences[0])[0] in (CAUSES.get(bug, bug), ALSO.get(bug))


@pytest.mark.slow
def test_a_loader_that_cuts_sequences_is_told_of_own_data(compared):
    assert RESHAPED in answer(compared("cut"))["notes"]


@pytest.mark.slow
def test_the_command_says_what_is_wrong_and_where(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    candidate = f"{TORCHRUN} {TRAIN} --engine plain --batch 4 --dropout 0.1 --device cuda --bug sum"
    reference = f"{sys.executable} {TRAIN} --batch 8 --dropout 0.1 --device cuda"
    assert main(["prove", "--reference", reference, "--candidate", candidate, "--json", "answer.json"]) == 1
    answer, printed = json.loads(Path("answer.json").read_text()), capfd.readouterr().out
    assert answer["first"]["cause"] == "sum for mean"
    assert answer["first"]["line"].startswith(f"{TRAIN}:")
    assert "WRONG    gradient of slope at step 1: times 2, the number of ranks" in printed
    assert "dropout was left out" in printed
    assert "the CPU took its place" in printed


@pytest.mark.slow
def test_attention_and_sums_that_only_a_gpu_has_run_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    candidate = f"{TORCHRUN} {TRAIN} --engine fsdp2 --batch 4 --device cuda"
    reference = f"{sys.executable} {TRAIN} --batch 8 --device cuda"
    assert main(["prove", "--reference", reference, "--candidate", candidate, "--json", "answer.json"]) == 0
    assert json.loads(Path("answer.json").read_text())["worst"]["gradient"] < 1e-4


LOOP = """
import sys, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
{end}
"""


@pytest.mark.parametrize(
    ("command", "end", "message"),
    [
        ("ls", "", "'ls' is not Python"),
        ("no-such-program", "", "no such program"),
        ("{python} {file} 2", "", "it ended after 2 of 3 steps"),
        ("{python} {file} 0", "", "without a backward pass"),
        ("{python} {file} 0", "model(torch.ones(2, 4)).sum().backward()", "derive yours from torch.optim.Optimizer"),
        ("{python} -I {file} 3", "", "did not read PYTHONPATH"),
        ("{python} {file} 1", "raise ValueError('a shape')", "it failed after 1 of 3 steps (ValueError: a shape)"),
        ("{torchrun} {file} 1", "raise ValueError('a shape')", "it failed after 1 of 3 steps (ValueError: a shape)"),
        ("{python} {file} 1", "time.sleep(1000)", "it made 1 of 3 steps in 60 s"),
        ("{python} {file} 1", "__import__('os').system(f'{sys.executable} {__file__} 1')", "two processes compute"),
    ],
)
def test_a_program_that_cannot_be_compared_is_refused_in_a_line(tmp_path, capfd, command, end, message):
    file = tmp_path / "loop.py"
    file.write_text(LOOP.format(end=end))
    command = command.format(python=sys.executable, file=file, torchrun=f"{TORCHRUN[:-1]}1")
    assert main(["prove", "--reference", command, "--candidate", command, "--time-limit", "60"]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.slow
def test_a_recipe_is_compared_with_one_process(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    # With this length a gradient of mere rounding becomes a whole step of Adam, and the next gradients are 2.3e-5 apart.
    assert main(["prove", "ddp", "--model", "tiny", "--n-layer", "2", "--seq-len", "64"]) == 0
    assert "right    2 ranks compute what one process computes, in 3 steps" in capfd.readouterr().out
    assert not list(tmp_path.iterdir())
    # Its launcher tries a step of a model of others.
    LlamaConfig(vocab_size=257, hidden_size=64, num_hidden_layers=2, num_attention_heads=2).save_pretrained("llama")
    assert main(["prove", "fsdp", "--model", "hf:llama", "--seq-len", "16"]) == 0


def test_parts_of_ranks_make_a_whole_and_replicas_are_compared():
    full = np.arange(12.0).reshape(4, 3)
    boxes = [HeldPart(r, {"box": [[2 * r, 2], [0, 3]]}, full[2 * r : 2 * r + 2]) for r in range(2)]
    flats = [
        HeldPart(2, {"flat": [5, 4]}, full.reshape(-1)[5:9]),
        HeldPart(3, {"rows": [1, [2, 0]]}, full[:, [2, 0]] + 0.5),
    ]
    assert np.array_equal(Whole(boxes, (4, 3)).values, full)
    assert Whole([*boxes, flats[0]], (4, 3)).apart == 0
    assert Whole([*boxes, *flats], (4, 3)).apart == 0.5
    assert Whole([HeldPart(0, {"box": [[0, 1]]}, np.array([np.nan]))] * 2, (1,)).apart == np.inf


def test_a_factor_is_seen_and_named():
    true = np.array([1.0, -2.0, 3e-3])
    assert factor(4 * true, true) == pytest.approx(4)
    assert factor(0 * true, true) == 0
    assert factor(true + 1, true) is None
    assert not alike(true, true * np.nan)
    assert words(4, 4) == "times 4, the number of ranks"
    assert words(0.5, 4) == "times 0.5, one over the root of the number of ranks"
    assert words(3, 4) == "times 3"
