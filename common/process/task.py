"""A piece of work in a process of its own, so that nothing of it is left for the next."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, NoReturn

from gptscale.common.errors import GptscaleError
from gptscale.common.process.program import Program
from gptscale.common.process.warm_parent import start_process

# benchmarks/gpu.sh sets less, so that a task that hangs is seen here before the whole bench is ended from outside.
LIMIT_S = float(os.environ.get("GPTSCALE_WORKER_LIMIT_S", "1800"))
# How the last line of a traceback begins: a class of Python's, a class with its module (triton...OutOfResources), our own line.
LAST_WORDS = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b|(\w+\.)+[A-Z]\w+: |gptscale: error:")
# lines of output that are passed on
PASSED_ON = 100


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


def reason(stderr: str) -> str:
    """Return the last line that names an exception, or the last line. CUDA and Dynamo print advice behind the exception."""
    lines = stderr.strip().splitlines() or ["no message"]
    return next((line for line in reversed(lines) if LAST_WORDS.match(line)), lines[-1])


def pass_on(stderr: str) -> None:
    """Pass on the last lines of a worker's stderr."""
    sys.stderr.write("".join(f"{line}\n" for line in stderr.splitlines()[-PASSED_ON:]))
    sys.stderr.flush()


def answer(work: Callable[[dict[str, Any]], dict[str, Any]]) -> NoReturn:
    """Do the task on the command line, print its result as the last line, and end the process.

    It ends at once, as a recipe's worker does: the interpreter's teardown sometimes aborts in a library's thread that is still
    alive.
    """
    print(json.dumps(work(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)


def run_captured(
    program: Program, *, timeout: float, environ: Mapping[str, str] | None = None, fork: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its exit status and what it printed.

    After `timeout` seconds the program is ended, and subprocess.TimeoutExpired raised.
    """
    pipes = {name: os.pipe() for name in ("stdout", "stderr")}
    process = start_process(
        program,
        os.environ if environ is None else environ,
        fork=fork,
        **{name: end for name, (_, end) in pipes.items()},
    )
    for _, end in pipes.values():
        os.close(end)
    output: dict[str, bytes] = dict.fromkeys(pipes, b"")
    streams: dict[IO[bytes], str] = {os.fdopen(begin, "rb", buffering=0): name for name, (begin, _) in pipes.items()}
    deadline = time.monotonic() + timeout
    while streams:
        for stream in select.select(list(streams), [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = stream.read(1 << 16)
            output[streams[stream]] += data
            if not data:
                del streams[stream]
                stream.close()
        if streams and time.monotonic() > deadline:
            process.send_signal(signal.SIGKILL)
            process.wait()
            raise subprocess.TimeoutExpired(program.command, timeout, output["stdout"], output["stderr"])
    status = process.wait(max(0.0, deadline - time.monotonic()) + 10.0)
    return subprocess.CompletedProcess(program.command, status, output["stdout"].decode(), output["stderr"].decode())
