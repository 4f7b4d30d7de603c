"""What a bench cannot measure is refused in one line, before anything runs."""

import shlex
from importlib import import_module

import pytest
import torch

from gptscale.launchers.cli import start

REFUSED = {
    "check": [("--mnist nowhere", "nowhere is not there, in --mnist")],
    "engines.__main__": [
        ("--recipes ddp,sinlge", "sinlge has no minimal loop, in --recipes"),
        ("--rounds 0", "rounds 0 is out of range"),
        ("--nproc 0", "nproc 0 is out of range"),
        ("--recipes ddp --model gtp2", "unknown model 'gtp2', in --model, did you mean 'gpt2'?"),
        ("--recipes ddp --n-embd 7", "n_embd 7 is not divisible by n_head 4"),
        ("--recipes hybrid_3d --nproc 3", "world 3 is not divisible by tp*cp*pp=2, in --nproc"),
        ("--csv nowhere/e.csv", "nowhere/e.csv cannot be written, in --csv"),
    ],
    "lenet.__main__": [
        ("--rounds 0", "rounds 0 is out of range, in --rounds, use 1 to 100"),
        ("--data nowhere", "nowhere is no folder"),
    ],
    "memory.__main__": [
        ("--models tinny", "unknown model 'tinny', in --models, did you mean 'tiny'?"),
        ("--ways sinlge", "unknown part 'sinlge' of 'sinlge', in --ways, did you mean 'single'?"),
        ("--ways single/fulll", "did you mean 'full'?"),
        ("--ways zero_offload/full/8bit", "unknown part '8bit'"),
        ("--ways single/full/fp32/x", "more than three parts"),
        ("--steps 1", "steps 1 is out of range, in --steps, use 2 to 10000"),
        ("--memory-gib 0", "memory_gib 0.0 is out of range"),
        ("--csv /nowhere/m.csv", "/nowhere/m.csv cannot be written, in --csv"),
        ("--nvme-path /nowhere", "/nowhere is no folder, in --nvme-path"),
        ("--device cuda --dry-run", "no CUDA device is visible"),
    ],
    "model.__main__": [
        ("--model 1.7b", "did you mean '1.6b'?"),
        ("--contenders single,minimum", "unknown contender 'minimum', in --contenders, did you mean 'minimal'?"),
        ("--contenders ''", "unknown contender ''"),
        ("--contenders single_graphs,single_fp8 --device cpu", "single_graphs, single_fp8: only on a CUDA device"),
        ("--hidden 100 --heads 3", "n_embd 100 is not divisible by n_head 3, in the model"),
        ("--steps 0", "steps 0 is out of range, in --steps, use 1 to 10000"),
        ("--batch-size -1", "batch_size -1 is out of range, in --batch-size"),
        ("--dtype fp16", "'fp16'"),
        ("--hiden 32", "did you mean '--hidden'?"),
        ("--data text --vocab-size 256", "text needs a vocabulary of 257, in --vocab-size"),
        ("--device cuda", "no CUDA device is visible, in --device cuda"),
        ("--csv nowhere/b.csv", "nowhere/b.csv cannot be written, in --csv"),
        ("--floors nowhere.csv", "nowhere.csv is no CSV with columns name and floor"),
        ("--floors f.csv --scale seq", "a scaling table has no floors"),
        ("--scale seq --rounds 2", "--scale seq has its own, a turn at each size, in --rounds"),
        ("--scale layers --layers 3", "in --layers, leave it out"),
        ("--scale seq --contenders single,minimal", "a scaling table is of one contender"),
    ],
    "ops.__main__": [
        ("--operators gulu", "unknown operator 'gulu', in --operators, did you mean 'gelu'?"),
        ("--dtypes fp8", "unknown dtype 'fp8', in --dtypes"),
        ("--threads 0", "bad threads '0', in --threads"),
        ("--rounds 0", "out of range"),
        ("--device tpu", "no device 'tpu' here, in --device"),
        ("--csv nowhere/o.csv", "nowhere/o.csv cannot be written, in --csv"),
        (f"--pictures {__file__}", "is no folder, in --pictures"),
    ],
}


@pytest.mark.parametrize(
    ("module", "words", "message"), [(module, *case) for module, cases in REFUSED.items() for case in cases]
)
def test_refused_before_anything_runs(module, words, message, capsys, folder):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is one")
    assert start(import_module(f"benchmarks.{module}").main, shlex.split(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(folder.iterdir())
