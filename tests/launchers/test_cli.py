"""The words of `gptscale`: their help, their errors, and what each imports."""

import dataclasses
import os
import shutil
import subprocess
import sys
from importlib.metadata import version

import pytest

from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.cli import COMMANDS, main
from gptscale.launchers.commands.run import LaunchOptions
from gptscale.launchers.run.options import parse_run
from gptscale.recipes import RECIPES

NEVER = {"pandas", "matplotlib", "jinja2", "transformers", "deepspeed", "wandb"}
NOT_BEFORE_OPTIONS_ARE_READ = NEVER | {"torch", "tensorboard"}


def python(*words, **environment):
    command, environment = [sys.executable, *words], os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


def test_help_of_run_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["run", "fsdp", "--help"])
    said = capsys.readouterr().out
    options = RunConfig, LaunchOptions, parse_run("fsdp", [])[1]
    names = [field.name.replace("_", "-") for kind in options for field in dataclasses.fields(kind)]
    assert not [name for name in names if name not in said]


def test_overviews_name_all_words_and_recipes(capsys):
    assert main([]) == main(["--help"]) == main(["--version"]) == 0
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    said = capsys.readouterr().out
    assert not [name for name in [*COMMANDS, *RECIPES] if name not in said]
    assert f"gptscale {version('gptscale')}\n" in said


def test_a_reader_that_leaves_early_is_no_error():
    """As with `gptscale --help | head -1`, the pipe is closed before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "gptscale.launchers.cli", "--help"]
    ended = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=400, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_on_a_terminal_too_the_message_is_one_plain_sentence():
    """tyro draws a coloured box there, with a title in its border. `script` gives the command a terminal."""
    script = shutil.which("script")
    if script is None:
        pytest.skip("no program `script` to make a terminal")
    command = f"{sys.executable} -m gptscale.launchers.cli run ddp --precision fp4"
    ended = subprocess.run(
        [script, "-qec", command, "/dev/null"], capture_output=True, text=True, timeout=400, check=False
    )
    assert ended.returncode == 2
    assert ended.stdout.strip() == (
        "gptscale: error: invalid choice 'fp4' for argument '--precision'. Expected one of ('fp32', 'bf16', 'fp16', 'fp8'), "
        "on the command line, see gptscale run ddp --help"
    )


@pytest.mark.parametrize(
    ("words", "status", "unwanted"),
    [
        (["run", "--help"], 0, NOT_BEFORE_OPTIONS_ARE_READ),
        (["--help"], 0, NOT_BEFORE_OPTIONS_ARE_READ),
        (["run", "ddp", "--precision", "fp4"], 2, NOT_BEFORE_OPTIONS_ARE_READ),
        (["run", "single", "--steps", "1", "--data", "synthetic", "--device", "cpu"], 0, NEVER),
    ],
    ids=["recipes", "help", "a refused option", "a run"],
)
def test_nothing_is_imported_that_is_not_needed(folder, words, status, unwanted):
    """Of the command and, since they inherit the variable, of the ranks that it starts."""
    ended = python("-m", "gptscale.launchers.cli", *words, PYTHONPROFILEIMPORTTIME="1")
    assert ended.returncode == status, ended.stderr[-2000:]
    lines = [line for line in ended.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.split("|")[-1].strip().split(".")[0] for line in lines}
    assert "gptscale" in imported
    assert not imported & unwanted


# Each is imported behind those above it, in one process of its list: its code, and what must not be there then.
IMPORTS = {
    "without torch": {
        "settings": (
            "import gptscale.common.recipe_config; from gptscale.common.settings import batch_plan, checks, command_line, gpt_config, run, run_config",
            "torch tyro",
        ),
        "every recipe, so that a wrong option is refused in a moment": (
            "import importlib, gptscale.recipes.unsupported; from gptscale.recipes import RECIPES\nfor r in RECIPES.values(): getattr(importlib.import_module(r.module), r.config)(**r.preset)",
            "torch numpy deepspeed fairscale accelerate lightning_fabric colossalai",
        ),
        "the package of the operators": ("import gptscale.ops", "torch"),
        "the studies of vision models, until an option is refused": (
            "from gptscale.launchers.cli import main; from gptscale.lenet.cli import USAGE\nfor word in USAGE.keys() - {'train'}: assert main(['lenet', word, '--bogus']) == 2",
            " ".join(NOT_BEFORE_OPTIONS_ARE_READ),
        ),
    },
    "with torch": {
        "the operators": (
            "import gptscale.ops.gelu, gptscale.ops.conv, gptscale.ops.max_pool",
            "triton torch._dynamo torch.utils.cpp_extension gptscale.common",
        ),
        "a run without them, with a checkpoint's reader and the state of plain tensors": (
            "import torch; from gptscale.common.checkpoint import reader, writer; from gptscale.common.engines import torch_engine; from gptscale.common.optim import fused, library; from gptscale.common.state import replicas, shard_of\n"
            "for x in (torch.zeros(2), torch.nn.Parameter(torch.zeros(2))): assert (shard_of('x', x).offset, replicas(x)) == ((0,), 1)",
            "torch.distributed.pipelining torch.distributed.tensor safetensors deepspeed colossalai",
        ),
        "all of common, which whoever reuses a recipe brings along": (
            "import importlib, pkgutil, gptscale.common as c\nfor m in pkgutil.walk_packages(c.__path__, 'gptscale.common.'): importlib.import_module(m.name)",
            "pandas matplotlib rich tyro transformers datasets deepspeed fairscale accelerate",
        ),
    },
}


@pytest.mark.parametrize("which", IMPORTS)
def test_importing_loads_none_of_the_heavy_modules(which):
    code = "import sys\n"
    for what, (imports, heavy) in IMPORTS[which].items():
        code += f"{imports}\nprint({what!r}, *[name for name in {heavy.split()} if name in sys.modules])\n"
    ended = python("-c", code)
    assert ended.stdout.splitlines() == [*IMPORTS[which]], ended.stderr[-2000:]


WITHIN = {
    "its work": "strike()",
    "a finalizer": "Struck = type('Struck', (), {'__del__': lambda self: strike()}); Struck()",
    "a callback of fork": "os.register_at_fork(after_in_parent=strike); os.fork() or os._exit(0)",
}


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_command_that_a_signal_ends_says_so_in_one_line(number, status, within):
    code = (
        "import os, signal, sys; from gptscale.launchers import cli\n"
        # A program that a shell starts in the background ignores SIGINT, and so do its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"def strike(): os.kill(os.getpid(), signal.{number})\n"
        f"def carry_out(words): {WITHIN[within]}; signal.pause()\n"
        "cli._carry_out = carry_out\n"
        "sys.exit(cli.main())"
    )
    ended = python("-c", code)
    assert ended.returncode == status
    assert ended.stderr == f"gptscale: error: ended by {number}, in this command, start it again\n"
