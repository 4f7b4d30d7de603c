"""The `gptscale` command: a table of its words, each with the module whose `main` carries it out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import FrameType
from typing import NoReturn

from gptscale.common.errors import (
    INTERRUPTED_EXIT_STATUS,
    PREEMPTED_EXIT_STATUS,
    ConfigError,
    GptscaleError,
    cannot_start,
)
from gptscale.common.process.begin import no_closed_streams
from gptscale.common.process.environments import name_user
from gptscale.common.process.fork_server import declare_fresh
from gptscale.common.process.mock import refuse_mock
from gptscale.common.settings.checks import check_name
from gptscale.common.settings.command_line import fail, refuse_repeated

# Word: its line of `gptscale --help`, behind "gptscale WORD".
COMMANDS = {
    "run": "RECIPE [options]: train with one strategy; `gptscale run --help` lists the recipes.",
    "submit": "RECIPE --nodes N [options]: the same as a job of Slurm, which resumes by itself.",
    "sweep": "--recipes A,B,C [options]: train with several, then compare.",
    "compare": "PATH... [--csv F] [--md F] [--png F] [--html F]: a table of results, and files of it.",
    "import": "wandb|torchtitan|lightning|csv PATH [options]: a run of another program, for compare.",
    "why": "RUN [--png F]: what limits a run's speed, what removing it would give, and what to do.",
    "parity": "[--recipes A,B] [--nproc N]: does each recipe compute what one process computes?",
    "prove": "RECIPE, or --reference 'python A' --candidate 'torchrun B': is a split program right, tensor by tensor?",
    "fit": "MODEL.py:build --gpus 8 [--write train.py]: a model of your own, its best split, the proof, and the code.",
    "simulate": "RECIPE --nproc 64 --as h100-80 [options]: the memory of one rank of any world, without a GPU.",
    "plan": "--model 1.6b --nodes 4 --device h100-80 [options]: which split fits and is fastest there.",
    "calibrate": "[--model tiny --nproc 2]: measure what this machine can do, for why and plan.",
    "checkpoint": "export|import FOLDER --out FOLDER [--format hf|dcp]: for transformers and other programs, or from them.",
    "doctor": "[--json]: what is installed, what can run here, and why not the rest.",
    "prepare": "[--recipes A,B]: compile what recipes need, once, before any run.",
    "tokenize": "INPUT... --out FILE.bin: text into memory-mapped tokens.",
    "lenet": "WORD [options]: the vision experiments; `gptscale lenet --help` lists the words.",
}
# The modules of words, below gptscale. One is imported when its word is given, so that a command loads only what it needs.
MODULES = {word: f"launchers.commands.{word}" for word in COMMANDS}
MODULES |= {word: f"foresight.commands.{word}" for word in ("why", "prove", "fit", "simulate", "plan", "calibrate")}
MODULES |= {"tokenize": "launchers.commands.tokenize_text", "lenet": "lenet.cli"}
MODULES["import"] += "_run"
HELP = ("-h", "--help", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command line of `gptscale` and return its exit status."""
    return start(_carry_out, argv)


def start(command: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Call a command and return its exit status: 2, after one line, for an error that is the user's.

    argv: its words; None for those that this process was started with.
    """
    if argv is None:
        no_closed_streams()
        declare_fresh()
        name_user()
        signal.signal(signal.SIGTERM, _stop)
        sys.unraisablehook = partial(_raise_later, os.getpid())
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        if words != ["--version"] and not {*words} & {*HELP}:
            refuse_mock("carry out this command")
        # The words behind `--` are those of another program.
        refuse_repeated(words[: words.index("--")] if "--" in words else words)
        status = command(words)
        sys.stdout.flush()
        return status
    except GptscaleError as error:
        return fail(error)
    except KeyboardInterrupt as end:
        name = "SIGTERM" if isinstance(end, Stopped) else "SIGINT"
        print(f"gptscale: error: ended by {name}, in this command, start it again", file=sys.stderr, flush=True)
        return PREEMPTED_EXIT_STATUS if isinstance(end, Stopped) else INTERRUPTED_EXIT_STATUS
    except BlockingIOError as error:
        return fail(cannot_start(str(error.strerror)))
    except BrokenPipeError:
        # The reader is gone, as of `gptscale ... | head`. What is left to flush must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # The status that a shell gives for SIGPIPE.
        return 141
    finally:
        if argv is None:
            # All is done. A traceback at the interpreter's end would help nobody.
            for number in (signal.SIGTERM, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)


class Stopped(KeyboardInterrupt):
    """SIGTERM to a command while it has no ranks. Running ranks get the signal themselves (ranks.launch)."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    # The end of the command takes what it has begun with it.
    signal.signal(number, signal.SIG_IGN)
    raise Stopped


def _raise_later(command: int, swallowed: sys.UnraisableHookArgs) -> None:
    """Raise a signal's exception again a moment later, if Python printed it and went on.

    Python does so in finalizers, and in callbacks of a fork, such as logging's. command: the id of the command's own process. A
    fork of it prints the exception, as usual.
    """
    if not isinstance(swallowed.exc_value, KeyboardInterrupt) or os.getpid() != command:
        sys.__unraisablehook__(swallowed)
        return
    error = type(swallowed.exc_value)

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise error

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01)


def _carry_out(words: Sequence[str]) -> int:
    if not words or words[0] in HELP:
        print(
            "Which way of splitting this GPT over these devices trains it fastest, fits, and computes the same thing?"
        )
        print("\n" + "\n".join(f"  gptscale {word} {line}" for word, line in COMMANDS.items()))
        print("\nEvery command has --help. A first try: gptscale sweep --recipes single,ddp,fsdp --nproc 2")
        return 0
    if words[0] == "--version":
        # A third of the start of a command.
        from importlib.metadata import version

        print(f"gptscale {version('gptscale')}")
        return 0
    if words[0].startswith("-"):
        raise ConfigError("a command is missing", "on the command line", "gptscale COMMAND")
    word, *others = words
    check_name(word, COMMANDS, "command", "on the command line")
    status: int = import_module(f"gptscale.{MODULES[word]}").main(others)
    return status


if __name__ == "__main__":
    sys.exit(main())
