"""A piece of work in a process of its own, so that nothing of it is left for the next."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import BinaryIO

from gptscale.common.process.program import Program
from gptscale.common.process.warm_parent import start_process

# How the last line of a traceback begins: a class of Python's, a class with its module (triton...OutOfResources), our own line.
LAST_WORDS = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b|(\w+\.)+[A-Z]\w+: |gptscale: error:")
# lines of output that are passed on
PASSED_ON = 100


def reason(stderr: str) -> str:
    """Return the last line that names an exception, or the last line. CUDA and Dynamo print advice behind the exception."""
    lines = stderr.strip().splitlines() or ["no message"]
    return next((line for line in reversed(lines) if LAST_WORDS.match(line)), lines[-1])


def pass_on(stderr: str) -> None:
    """Pass on the last lines of a worker's stderr."""
    sys.stderr.write("".join(f"{line}\n" for line in stderr.splitlines()[-PASSED_ON:]))
    sys.stderr.flush()


def run_captured(
    program: Program, *, timeout: float, environ: Mapping[str, str] | None = None, fork: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its exit status and what it printed.

    After `timeout` seconds the program is ended, and subprocess.TimeoutExpired raised.
    """
    with open(os.memfd_create("stdout"), "r+b") as out, open(os.memfd_create("stderr"), "r+b") as err:
        environ = os.environ if environ is None else environ
        process = start_process(program, environ, fork=fork, stdout=out.fileno(), stderr=err.fileno())
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            raise subprocess.TimeoutExpired(program.command, timeout, content(out), content(err)) from None
        return subprocess.CompletedProcess(program.command, status, content(out).decode(), content(err).decode())


def content(output: BinaryIO) -> bytes:
    """Return all that was written to a file."""
    output.seek(0)
    return output.read()
