"""The `gptscale` command: each word behind it is one function here or in a module of its name."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.common.settings.checks import did_you_mean
from gptscale.common.settings.command_line import fail
from gptscale.launchers.run.options import parse_launch
from gptscale.recipes import RECIPES, get
from gptscale.results.render import console, table


@dataclass(frozen=True)
class LaunchOptions:
    """How many processes, or none at all."""

    nproc: int | None = None
    """Processes on this machine; default one per GPU, or one. Several nodes: see launchers/multinode.sh."""
    dry_run: bool = False
    """Print what would run and stop; nothing is created."""

    def __post_init__(self) -> None:
        if self.nproc is not None and not 1 <= self.nproc <= 1024:
            raise ConfigError(f"nproc {self.nproc} is out of range", "in --nproc", "use 1 to 1024")


def run(argv: Sequence[str]) -> int:
    """gptscale run RECIPE [options]: train with one strategy."""
    recipe = _first_word(argv, "run RECIPE [options]", "a recipe", RECIPES)
    config, recipe_config, options = parse_launch(recipe, argv[1:], LaunchOptions)
    assert options is not None
    from gptscale.launchers.run.start import command_line, default_nproc, plan_run, start

    nproc = options.nproc or default_nproc(recipe, config)
    if not options.dry_run:
        return start(recipe, config, recipe_config, nproc)
    for line in plan_run(recipe, config, recipe_config, nproc).describe():
        print(line)
    print("command  " + " ".join(command_line(recipe, config, recipe_config, nproc)))
    return 0


def sweep(argv: Sequence[str]) -> int:
    """gptscale sweep --recipes A,B,C [options]: train with several, then compare."""
    from gptscale.launchers.commands.sweep import main

    return main(argv)


def compare(argv: Sequence[str]) -> int:
    """gptscale compare PATH... [--csv F] [--md F] [--png F] [--html F]: a table of results, and files of it."""
    from gptscale.launchers.commands.compare import main

    return main(argv)


def parity(argv: Sequence[str]) -> int:
    """gptscale parity [--recipes A,B] [--nproc N]: does each recipe compute what one process computes?"""
    from gptscale.launchers.commands.parity import main

    return main(argv)


def trace(argv: Sequence[str]) -> int:
    """gptscale trace [--schedules A,B] [--nproc N] [options]: a picture of each pipeline schedule, from real steps."""
    from gptscale.launchers.commands.trace_pipeline import main

    return main(argv)


def doctor(argv: Sequence[str]) -> int:
    """gptscale doctor [--json]: what is installed, what can run here, and why not the rest."""
    from gptscale.launchers.commands.doctor import main

    return main(argv)


def prepare(argv: Sequence[str]) -> int:
    """gptscale prepare [--recipes A,B]: compile what recipes need, once, before any run."""
    from gptscale.launchers.commands.prepare import main

    return main(argv)


def tokenize(argv: Sequence[str]) -> int:
    """gptscale tokenize INPUT... --out FILE.bin: text into memory-mapped tokens."""
    from gptscale.launchers.commands.tokenize_text import main

    return main(argv)


def bench(argv: Sequence[str]) -> int:
    """gptscale bench model|parts|memory|handout|loop|data|engines|ops: measurements against alternatives in the same run."""
    if argv and argv[0] == "engines":
        from gptscale.launchers.bench.engines.command import main as engines

        return engines(argv[1:])
    if argv and argv[0] == "ops":
        from gptscale.launchers.bench.ops.command import main as ops

        return ops(argv[1:])
    if argv and argv[0] == "parts":
        from gptscale.launchers.bench.parts.command import main as parts

        return parts(argv[1:])
    if argv and argv[0] == "memory":
        from gptscale.launchers.bench.memory.command import main as memory

        return memory(argv[1:])
    if argv and argv[0] == "model":
        from gptscale.launchers.bench.model.command import main as model

        return model(argv[1:])
    from gptscale.launchers.bench.model.loop_bench import main

    return main(argv)


def lenet(argv: Sequence[str]) -> int:
    """gptscale lenet WORD [options]: the vision experiments; `gptscale lenet --help` lists the words."""
    from gptscale.lenet.cli import main

    return main(argv)


def minigrad(argv: Sequence[str]) -> int:
    """gptscale minigrad [--model pure_linear|simple_conv|LeNet]: train with a small autograd, beside the old figures."""
    from gptscale.lenet.minigrad.experiment import main

    return main(argv)


def list_recipes(argv: Sequence[str]) -> int:
    """gptscale list: the recipes."""
    if argv:
        raise ConfigError(f"unexpected {argv[0]!r}", "after list", "gptscale list takes no options")
    rows = [(name, recipe.engine, " ".join(recipe.axes) or "-", recipe.what) for name, recipe in RECIPES.items()]
    console(120).print(table(("recipe", "engine", "splits", "what it does"), rows))
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": run,
    "sweep": sweep,
    "compare": compare,
    "parity": parity,
    "trace": trace,
    "list": list_recipes,
    "doctor": doctor,
    "prepare": prepare,
    "tokenize": tokenize,
    "bench": bench,
    "lenet": lenet,
    "minigrad": minigrad,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; a user's error is one line and exit status 2."""
    try:
        status = _carry_out(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except GptscaleError as error:
        return fail(error)
    except BrokenPipeError:  # as of `gptscale ... | head`; what is left to flush must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell says of SIGPIPE


def _carry_out(words: Sequence[str]) -> int:
    """The command that the words name."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(
            "Which way of splitting this GPT over these devices trains it fastest, fits, and computes the same thing?\n"
        )
        for command in COMMANDS.values():
            print("  " + str(command.__doc__))
        print("\nEvery command has --help. A first try: gptscale sweep --recipes single,ddp,fsdp --nproc 2")
        return 0
    if words[0] == "--version":
        print(f"gptscale {importlib.metadata.version('gptscale')}")
        return 0
    _first_word(words, "COMMAND", "a command", COMMANDS)
    return COMMANDS[words[0]](words[1:])


def _first_word(argv: Sequence[str], usage: str, kind: str, known: object) -> str:
    """The first word, if it is one of `known`."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: gptscale {usage}\n\nFor the options: gptscale run ddp --help")
        raise SystemExit(0)
    if not argv or argv[0].startswith("-"):
        raise ConfigError(f"{kind} is missing", "on the command line", f"gptscale {usage}")
    if known is RECIPES:
        get(argv[0])
    elif argv[0] not in COMMANDS:
        raise ConfigError(f"unknown command {argv[0]!r}", "on the command line", did_you_mean(argv[0], COMMANDS))
    return argv[0]


if __name__ == "__main__":
    sys.exit(main())
