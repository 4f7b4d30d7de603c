"""A piece of work in a process of its own, so that nothing of it is left for the next."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from tempfile import TemporaryFile
from typing import IO

from gptscale.common.process.program import Program
from gptscale.common.process.warm_parent import start_process

# How the last line of a traceback begins: a class of Python's, a class with its module (triton...OutOfResources), our own line.
LAST_WORDS = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b(?!:\s*$)|(\w+\.)+[A-Z]\w+: |gptscale: error:")


def reason(stderr: str) -> str:
    """Return the last line that names an exception, or the last line. A line about a lost peer counts only if it is alone."""
    lines = stderr.strip().splitlines() or ["no message"]
    named = [line for line in reversed(lines) if LAST_WORDS.match(line)]
    return next((line for line in named if " by peer" not in line), (named or lines[-1:])[0])


def pass_on(stderr: str) -> None:
    """Pass on the last 100 lines of a worker's stderr."""
    sys.stderr.write("".join(f"{line}\n" for line in stderr.splitlines()[-100:]))
    sys.stderr.flush()


def run_captured(
    program: Program, *, timeout: float, environ: Mapping[str, str] | None = None, fork: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its exit status and what it printed.

    After `timeout` seconds the program is ended, and subprocess.TimeoutExpired raised.
    """
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        streams = {"stdout": stdout.fileno(), "stderr": stderr.fileno()}
        process = start_process(program, os.environ if environ is None else environ, fork=fork, **streams)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            raise subprocess.TimeoutExpired(program.command, timeout, _content(stdout), _content(stderr)) from None
        output = _content(stdout).decode(), _content(stderr).decode()
        return subprocess.CompletedProcess(program.command, status, *output)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
