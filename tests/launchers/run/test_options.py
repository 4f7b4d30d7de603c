import dataclasses
import os
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.cli import COMMANDS, LaunchOptions, main
from gptscale.launchers.run.options import option_words, parse_launch, parse_run
from gptscale.recipes import RECIPES


def test_defaults_are_the_dataclass():
    assert parse_run("single", [])[0] == RunConfig()


def test_kebab_and_snake_case_and_equals_signs():
    for words in (["--global-batch-size", "4"], ["--global_batch_size", "4"], ["--global-batch-size=4"]):
        assert parse_run("ddp", words)[0].global_batch_size == 4


def test_recipe_options_stand_beside_the_runs_and_the_launchers():
    run, recipe, launch = parse_launch(
        "fsdp", ["--prefetch", "3", "--nproc", "4", "--lr", "0.1", "--dry-run"], LaunchOptions
    )
    assert (recipe.prefetch, launch.nproc, launch.dry_run, run.lr) == (3, 4, True, 0.1)


@pytest.mark.parametrize(
    ("words", "resume"), [(["--resume"], "auto"), (["--resume", "a/b"], "a/b"), (["--resume", "--steps", "3"], "auto")]
)
def test_bare_resume(words, resume):
    assert parse_run("ddp", ["--run-name", "r", *words])[0].resume == resume


def test_a_preset_is_the_default_and_fixed():
    assert parse_run("fsdp_offload", [])[1].cpu_offload
    with pytest.raises(ConfigError, match="fixes cpu_offload"):
        parse_run("fsdp_offload", ["--no-cpu-offload"])


@settings(max_examples=25, deadline=None)
@given(
    steps=st.integers(1, 10**9), lr=st.none() | st.floats(0, 100), compile=st.booleans(), resume=st.sampled_from([None, "a b/c", "x;y"]),
    precision=st.sampled_from(["fp32", "bf16", "fp16", "fp8"]), prefetch=st.integers(1, 9), reshard=st.booleans(),
)  # fmt: skip
def test_options_survive_the_way_to_the_workers(steps, lr, compile, resume, precision, prefetch, reshard):
    """What `gptscale run` parsed is what each rank parses from the words it is started with."""
    run = RunConfig(steps=steps, lr=lr, compile=compile, resume=resume, precision=precision)
    recipe = dataclasses.replace(parse_run("fsdp", [])[1], prefetch=prefetch, reshard_after_forward=reshard)
    assert parse_run("fsdp", option_words("fsdp", run, recipe)) == (run, recipe)


@pytest.mark.parametrize(
    "words", [["run", "fsdp"], ["sweep"], ["parity"], ["compare"], ["doctor"], ["bench"], ["tokenize"]]
)
def test_help(words, capsys):
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    assert "usage: gptscale " + words[0] in capsys.readouterr().out


def test_help_of_run_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["run", "fsdp", "--help"])
    said = capsys.readouterr().out
    fields = [
        *dataclasses.fields(RunConfig),
        *dataclasses.fields(LaunchOptions),
        *dataclasses.fields(parse_run("fsdp", [])[1]),
    ]
    assert not [f.name for f in fields if f.name.replace("_", "-") not in said]


def test_overview_and_list(capsys):
    assert main([]) == main(["--help"]) == main(["list"]) == main(["--version"]) == 0
    said = capsys.readouterr().out
    assert not [name for name in [*COMMANDS, *RECIPES] if name not in said]
    assert "gptscale 0.1.0" in said


def test_a_reader_that_leaves_early_is_no_error():
    """As with `gptscale --help | head -1`; the pipe is closed before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "gptscale.launchers.cli", "--help"]
    ended = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_on_a_terminal_too_the_message_is_one_plain_sentence():
    """tyro draws a coloured box there, with a title in its border; `script` gives the command a terminal."""
    script = shutil.which("script")
    if script is None:
        pytest.skip("no program `script` to make a terminal")
    command = f"{sys.executable} -m gptscale.launchers.cli run ddp --precision fp4"
    ended = subprocess.run(
        [script, "-qec", command, "/dev/null"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stdout.strip() == (
        "gptscale: error: invalid choice 'fp4' for argument '--precision'. Expected one of ('fp32', 'bf16', 'fp16', 'fp8'), "
        "on the command line, see gptscale run ddp --help"
    )
