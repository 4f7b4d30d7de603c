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


RIGHT = {
    "plain": ("--accumulate 2", "--two"),
    "ddp": ("--clip 0.5", "--pad", "--bf16", "--compile", "--optimizer Own"),
    "fsdp1": ("", "--optimizer SGD"),
    "fsdp2": ("--clip 0.5",),
    "accelerate": ("--tie",),
    "fabric": ("--seed 1 --freeze",),
    "tensor": ("--accumulate 2",),
    "pipeline": ("--tie", "--accumulate 2 --tie"),
    "zero2": ("--clip 0.5",),
    "trainer": ("--clip 0.5",),
    "lightning": ("--accumulate 2",),
    **dict.fromkeys("zero3 sharded redundancy fsdp2@4 tensor@4".split(), ("",)),
}
PLANTED = {
    "plain": "sum divided-twice wrong-group stale skipped no-broadcast",
    "ddp": "no-reduce same-batch not-held",
    "ddp --clip 0.05": "norm-omits drift",
    "ddp --pad": "padding",
    "fsdp1": "rate",
    "fsdp2": "zero",
    "fsdp2 --clip 0.05": "local-norm norm-by-root",
    "accelerate --accumulate 2": "accumulation",
    "pipeline --accumulate 2 --tie": "accumulation",
    "pipeline --tie": "tied",
    **dict.fromkeys(("fabric", "lightning"), "late-clear"),
    **dict.fromkeys(("tensor", "tensor@4"), "half-zero"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "words"), [(engine, words) for engine, each in RIGHT.items() for words in each])
def test_a_right_program_is_called_right(compared, engine, words):
    comparison = compared(engine, words)
    assert not comparison.differences
    assert max(comparison.worst.values()) <= (6e-2 if "bf16" in words else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("split", "bug"), [(split, bug) for split, bugs in PLANTED.items() for bug in bugs.split()])
def test_a_planted_bug_is_found_and_named(compared, split, bug):
    engine, _, words = split.partition(" ")
    comparison = compared(engine, words, bug)
    assert comparison.differences
    assert finding(comparison, comparison.differences[0])[0] in (CAUSES.get(bug, bug), ALSO.get(bug))


@pytest.mark.slow
def test_a_loader_that_cuts_sequences_is_told_of_own_data(compared):
    assert RESHAPED in answer(compared("cut"))["notes"]


def proved(words, own):
    """Return how a program split by an engine compares with one process: the exit status, and the answer."""
    candidate = f"{TORCHRUN} {TRAIN} --batch 4 --device cuda {words} {own}"
    reference = f"{TORCHRUN[:-1]}1 {TRAIN} --batch 8 --device cuda {words}"
    status = main(["prove", "--reference", reference, "--candidate", candidate, "--json", "answer.json"])
    return status, json.loads(Path("answer.json").read_text())


@pytest.mark.slow
def test_the_command_says_what_is_wrong_and_where(folder, capfd):
    status, said = proved("--dropout 0.1", "--engine plain --bug sum")
    printed = capfd.readouterr().out
    assert (status, said["first"]["cause"]) == (1, "sum for mean")
    assert said["first"]["line"].startswith(f"{TRAIN}:")
    assert "WRONG    gradient of slope at step 1: times 2, the number of ranks" in printed
    assert "dropout was left out" in printed
    assert "the CPU took its place" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "own", "note"),
    [
        ("", "--engine fsdp2", ""),
        ("", "--engine tensor --batch 8", ""),
        # One process holds its weights flat, too.
        ("--engine fsdp1", "", ""),
        ("--optimizer Inside", "--engine inside", "the optimizer exchanges gradients"),
    ],
)
def test_what_only_a_gpu_has_runs_on_the_cpu(folder, words, own, note):
    status, said = proved(words, own)
    assert status == 0
    assert said["worst"].get("gradient", 0.0) < 1e-4
    assert note in " ".join(said["notes"])


LOOP = """
import sys, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    (float(sys.argv[-1]) * model(torch.ones(2, 4))).sum().backward()
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
        ("{python} {file} 3 0", "", "the largest gradient of the reference is 0"),
        ("{python} {file} 3 nan", "", "the largest gradient of the reference is nan"),
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
def test_a_recipe_is_compared_with_one_process(folder, capfd):
    # With this length a gradient of mere rounding becomes a whole step of Adam, and the next gradients are 2.3e-5 apart.
    assert main(["prove", "ddp", "--model", "tiny", "--n-layer", "2", "--seq-len", "64"]) == 0
    assert "right    2 ranks compute what one process computes, in 3 steps" in capfd.readouterr().out
    assert not list(folder.iterdir())
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
