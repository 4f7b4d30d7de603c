"""A turn of a bench in a process of its own, so that nothing of it is left for the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from gptscale.common.errors import GptscaleError
from gptscale.common.process.program import Program
from gptscale.common.process.task import pass_on, reason, run_captured

# Set less where the whole bench is ended from outside, so that a task that hangs is seen here before.
LIMIT_S = float(os.environ.get("GPTSCALE_WORKER_LIMIT_S", "1800"))


def run_worker(module: str, task: dict[str, Any]) -> dict[str, Any]:
    """Run a module that ends in `answer` on a task, and return its result.

    Raises GptscaleError if it fails, after its last lines of stderr have been passed on.
    """
    import torch

    program = Program(module, (json.dumps(task),))
    try:
        ended = run_captured(program, timeout=LIMIT_S, fork=not torch.cuda.is_available())
    except subprocess.TimeoutExpired as error:
        # It is bytes here, whatever `text` says.
        pass_on((error.stderr or b"").decode(errors="replace"))
        what = f"{task['contender']} took more than {LIMIT_S:g} s"
        raise GptscaleError(what, "in bench", "measure a smaller model or fewer steps") from None
    if ended.returncode:
        pass_on(ended.stderr)
        what = f"{task['contender']} failed ({reason(ended.stderr)[:200]})"
        raise GptscaleError(what, "in bench", "see the requirements of that contender")
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def answer(work: Callable[[dict[str, Any]], dict[str, Any]]) -> NoReturn:
    """Do the task on the command line, print its result as the last line, and end the process.

    It ends at once, as a recipe's worker does: the interpreter's teardown sometimes aborts in a library's thread that is still
    alive.
    """
    print(json.dumps(work(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
