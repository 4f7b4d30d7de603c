"""What the commands of the lab cannot do is refused in one line, and nothing starts."""

import shlex
import shutil
from pathlib import Path

import pytest
from told_trials import tried

from gptscale.foresight.plan import planning

OWN = Path(__file__).parents[1] / "fit" / "own_model.py"
LOGITS = "own_model.py:Logits --batch own_model.py"
REFUSED = {
    "plan": [
        ("--device h100", "unknown device 'h100', in --device, did you mean 'h100-80'"),
        ("--device tpu", "For this machine's processor: gptscale plan --here"),
        ("--link ib-4000", "unknown link 'ib-4000', in --link, did you mean"),
        ("--nodes 0", "nodes 0 is out of range"),
        ("--model gpt5", "unknown model 'gpt5'"),
        ("--recipes dpp", "unknown recipe 'dpp', in --recipes, did you mean 'ddp'"),
        ("--recipes single", "no recipe accepts this work ... it is one process, not 8"),
        ("--recipes ddp --global-batch-size 9", "global batch 9 is not a multiple of 8"),
        ("--recipes tensor_parallel --gpus-per-node 5", "no recipe accepts this work"),
        ("--recipes ddp,fsdp --model gpt3-175b", "nothing fits ... : fsdp dp8, ... comes nearest and lacks"),
        ("--recipes ddp --explain 99", "the table has no row 99"),
        ("--here --device h200", "--here is this machine"),
        ("--nproc 4", "the devices are --nodes times"),
        ("--scaling", "the picture has no file"),
    ],
    "calibrate --device cpu --out c.json": [
        ("--model tinny", "unknown model 'tinny'"),
        ("--tp 3", "'3' does not divide 4 heads, in --tp, use one or more of"),
        ("--tp two", "'two' does not divide"),
        ("--micro-batch-size 2,x", "'2,x' is no list of numbers"),
        ("--repeats 1", "repeats"),
        ("--n-head 5", "n_embd 128 is not divisible by n_head 5"),
    ],
    "simulate fsdp": [
        ("--device cpu", "ranks on CPUs are not simulated, in --device cpu, leave it out"),
        ("--rank 1", "no such rank"),
        ("python", "unknown option 'python', on the command line, see gptscale simulate fsdp --help"),
        ("--host-memory 0", "in --host-memory"),
        ("--as h20", "unknown device 'h20', in --as, did you mean 'h200'"),
        (f"--save {__file__}/new/folder", "test_bad_input.py is no folder, in --save"),
        ("--steps 9", "a simulation is a few steps and leaves no run, in --steps"),
    ],
    "simulate": [
        ("--", "no program, behind --"),
        ("-- no-such-command", "no such program: 'no-such-command'"),
        ("-- sh train.sh", "'sh' is not Python, behind --, begin with python"),
        ("--world 4 --rank 4 -- python", "'4', in --rank, use numbers from 0 to 3, last, or all-stages"),
        ("--rank 0,all-stages -- python", "no such rank: 'all-stages'"),
        ("--steps 0 -- python", "in --steps"),
        ("--as h1000 -- python", "unknown device 'h1000'"),
        ("--steps 1 --steps 2 -- python", "--steps is given twice"),
    ],
    "fit": [
        ("nowhere.py:build", "there is no file nowhere.py"),
        ("own_model.py", "names no function"),
        ("own_model.py:bild", "has no function bild"),
        ("own_model.py:failing", "failing() fails (ValueError: no such width)"),
        ("own_model.py:number", "number() returns int"),
        ("own_model.py:meta", "its weights are on the meta device"),
        ("own_model.py:build --batch own_model.py:number", "--batch"),
        ("own_model.py:build --batch own_model.py:wide", "does not take the batch (RuntimeError"),
        (f"{LOGITS}:alike", "2 and 4 samples have the same shapes"),
        (f"{LOGITS}:unlike", "two calls with one seed of torch give unlike"),
        (f"{LOGITS}:logits_batch --loss own_model.py:losses", "the function returns a tensor of shape (2,)"),
        (f"{LOGITS}:logits_batch --loss own_model.py:number", "the loss fails (TypeError"),
        ("own-model.py:build", "no module can be named own-model"),
        ("own_model.py:build --global-batch-size 12", "cannot be dealt to 8 GPUs"),
        ("own_model.py:build --gpus 8 --nodes 3", "not the same number"),
        ("own_model.py:build --write own_model.py", "is there already"),
        ("own_model.py:build --write accelerate.py", "would hide the module accelerate"),
        ("own_model.py:build --splits dpp", "did you mean"),
        ("own_model.py:build --as h1000", "unknown device 'h1000', in --as"),
        ("hf:own_model.py", "is no config of transformers"),
    ],
}


@pytest.mark.parametrize(
    ("command", "words", "message"), [(command, *case) for command, cases in REFUSED.items() for case in cases]
)
def test_refused_in_one_line(command, words, message, refused, folder, monkeypatch):
    monkeypatch.setattr(planning, "simulated", tried)
    # Importing a model leaves no file of its code.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name in ("own_model.py", "own-model.py"):
        shutil.copy(OWN, folder / name)
    line = refused(shlex.split(f"{command} {words}"))
    assert all(part in line for part in message.split(" ... "))
