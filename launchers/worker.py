"""A piece of work in a process of its own: what one contender takes from the machine is not there for the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from gptscale.common.errors import GptscaleError
from gptscale.launchers.local import die_with_parent

TIMEOUT_S = 1800.0


def run_worker(module: str, task: dict[str, Any]) -> dict[str, Any]:
    """Run `module`, which ends in `answer`, on a task, and return its result; GptscaleError if it fails."""
    command = [sys.executable, "-m", module, json.dumps(task)]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, preexec_fn=die_with_parent
        )
    except subprocess.TimeoutExpired:
        what = f"{task['contender']} took more than {TIMEOUT_S:g} s"
        raise GptscaleError(what, "in bench", "measure a smaller model or fewer steps") from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        what = f"{task['contender']} failed ({last[:200]})"
        raise GptscaleError(what, "in bench", "see the requirements of that contender")
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def answer(work: Callable[[dict[str, Any]], dict[str, Any]]) -> NoReturn:
    """Do the task on the command line, print its result as the last line, and end the process.

    At once, as a recipe's worker ends (launchers/entry.py): the interpreter's teardown aborts now and then in a library's
    thread that is still alive.
    """
    print(json.dumps(work(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
