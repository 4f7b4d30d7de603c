"""Random command lines: each is accepted or refused in one line, soon, and none is a traceback.

GPTSCALE_FUZZ_LINES=5000 tries so many; the default is a few of every command.
"""

import dataclasses
import os
import random
import time
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from gptscale.common.errors import GptscaleError
from gptscale.common.settings.checks import option_of
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers import cli
from gptscale.launchers.commands import compare, parity, run, sweep
from gptscale.launchers.run import start
from gptscale.launchers.run.options import default_recipe_config
from gptscale.lenet import cli as lenet_cli
from gptscale.lenet.run import worker
from gptscale.lenet.run.config import VisionConfig
from gptscale.recipes import RECIPES

LINES = int(os.environ.get("GPTSCALE_FUZZ_LINES", "120"))
SEED = int(os.environ.get("GPTSCALE_FUZZ_SEED", "0"))
# Processor seconds by exit status: a parity that is accepted imports every engine and checks forty runs.
LONGEST_S = {0: 20.0, 2: 5.0}
WORDS = (
    "", "0", "1", "2", "3", "4", "7", "8", "16", "-1", "0.1", "0.5", "1e-3", "1e9", "nan", "inf", "-inf", "10000", "1000000",
    "10000000", "1000000000000", "9" * 400, "auto", "all", "none", "x", "é\u202e", "a\nb", "\x1b[31m", "../../x", "/", ".",
    "--", "-", "single,ddp", "tiny", "gpt2", "gpt3-175b", "1.6b", "synthetic", "nowhere.bin", "empty.bin", "cpu", "cuda", "{0}",
    "1,2", "2,2", "3,1", "adamw,sgd", "gelu", "fp32,bf16", "lenet", "cnn", "digits", "True", "False",
)  # fmt: skip


def trains(*args, **options):
    """Stand for training, which only an accepted command line comes to."""
    raise SystemExit(0)


def kinds(words):
    """Return the dataclasses of options that a command has."""
    if words[0] == "run" and words[1] in RECIPES:
        try:
            return [RunConfig, type(default_recipe_config(words[1])), run.LaunchOptions]
        except GptscaleError:
            # The engine of this recipe is not installed.
            return [run.LaunchOptions]
    return {
        "sweep": [sweep.SweepOptions, RunConfig],
        "parity": [parity.ParityOptions],
        "compare": [compare.CompareOptions],
        "lenet train": [VisionConfig, lenet_cli.TrainOptions],
    }.get(" ".join(words[:2]) if words[0] == "lenet" else words[0], [run.LaunchOptions])


def value_of(kind, draw):
    """Return the words of a value: mostly one that its type takes."""
    choices = [choice for part in (kind, *get_args(kind)) for choice in get_args(part) if get_origin(part) is Literal]
    if draw.random() < 0.1:
        return []
    return [str(draw.choice(choices))] if choices and draw.random() < 0.8 else [draw.choice(WORDS)]


def line(draw):
    """Return a command that trains nothing, with some options of its own and now and then another word."""
    recipe = draw.choice([*RECIPES, "x"])
    commands = [["run", recipe, "--dry-run"]] * 3 + [["compare", "."], ["lenet", "train"]]
    commands += [["sweep", "--recipes", "single,ddp,fsdp"], ["parity", "--recipes", "ddp"]]
    words = list(draw.choice(commands))
    hints = {f.name: get_type_hints(k).get(f.name) for k in kinds(words) for f in dataclasses.fields(k)}
    # The one would train nothing, and the other is no option but holds those of the run.
    hints = {name: hint for name, hint in hints.items() if name not in ("dry_run", "run")}
    for name in draw.sample(sorted(hints), min(len(hints), draw.choice((0, 1, 1, 2, 2, 3, 4, 6)))):
        option = option_of(name) if draw.random() < 0.9 else option_of(name)[: draw.randint(1, 9)]
        if hints[name] is bool:
            words.append(option if draw.random() < 0.7 else option.replace("--", "--no-"))
            continue
        value = value_of(hints[name], draw)
        words += [f"{option}={value[0]}"] if value and draw.random() < 0.3 else [option, *value]
    if draw.random() < 0.1:
        words.insert(draw.randint(0, len(words)), draw.choice(WORDS))
    return words


@pytest.mark.slow
def test_random_command_lines_are_accepted_or_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.bin").write_bytes(b"")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for module in (run, sweep, parity, lenet_cli):
        monkeypatch.setattr(module, "begin_warm_parent", lambda *args, **options: None)
    monkeypatch.setattr(start, "launch_with_row", trains)
    monkeypatch.setattr(worker, "train", trains)
    monkeypatch.setattr("gptscale.results.record.launch_with_row.launch_with_row", trains)
    draw, failures = random.Random(SEED), []
    for _ in range(LINES):
        words, began = line(draw), time.process_time()
        try:
            status: object = cli.main(words)
        except SystemExit as end:
            status = end.code or 0
        except BaseException as error:
            status = f"{type(error).__name__}: {error}"
        took, said = time.process_time() - began, capsys.readouterr().err.splitlines()
        said = [text for text in said if not text.startswith("leaving out ")]
        is_one_line = len(said) == 1 and said[0].startswith("gptscale: error: ")
        if not (status == 0 or (status == 2 and is_one_line)) or took > LONGEST_S[status]:
            failures.append(f"{words}: {status} after {took:.1f} s, {said}")
    assert not failures, "\n".join(failures[:20])
