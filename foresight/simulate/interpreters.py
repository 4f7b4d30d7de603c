"""The interpreter that a program starts, the torch that it finds, and the mock of CUDA for that torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gptscale.common.errors import ConfigError
from gptscale.common.process import environments
from gptscale.common.process.task import reason
from gptscale.foresight.mock_cuda.build import prepare

PYTHON = re.compile(r"python[\d.]*$")
# The interpreter of a script: in its first line, or where that would be too long, in its second, which a shell reads.
SHEBANG = re.compile(rb"#!\s*(?:\S*/env\s+)?(\S*python[\d.]*)|#!/bin/sh\n'''exec' \"?([^\"\n]*python[\d.]*)")
FIND_TORCH = "import importlib.util; s = importlib.util.find_spec('torch'); print(s.origin if s else '')"


def interpreter_of(command: Sequence[str]) -> str:
    """Return the Python that a command starts, or raise ConfigError if it starts none."""
    path = shutil.which(command[0])
    if path is None:
        raise ConfigError(f"no such program: {command[0]!r}", "behind --", "write the command as you type it today")
    if PYTHON.search(path):
        return path
    with open(path, "rb") as file:
        words = SHEBANG.match(file.read(1000))
    python = words and shutil.which((words[1] or words[2]).decode())
    if not python:
        raise ConfigError(f"{command[0]!r} is not Python", "behind --", "begin with python, torchrun or accelerate")
    return python


def torch_of(python: str) -> Path:
    """Return the folder of an interpreter's torch, or raise ConfigError without one that has CUDA."""
    found = subprocess.run([python, "-c", FIND_TORCH], capture_output=True, text=True, timeout=60, check=False)
    origin = found.stdout.strip().splitlines()
    if not origin or not origin[-1]:
        why = "" if not found.returncode else f" ({reason(found.stderr)[:200]})"
        raise ConfigError(f"torch is not installed{why}", f"at {python}", "name the Python of your environment")
    folder = Path(origin[-1]).parent
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        raise ConfigError("this torch was built without CUDA", f"at {folder}", "pip install torch, as PyPI has it")
    return folder


def prepare_mock(environment: str = "") -> Path:
    """Compile the mock for the torch of an environment, unless that was done, and return its library."""
    return prepare(torch_folder_of(environment) / "lib")


def torch_folder_of(environment: str) -> Path:
    """Return the folder of the torch of an environment, or raise ConfigError without one that has CUDA."""
    python = environments.python(environment)
    if not Path(python).exists():
        where = f"at {environments.folder(environment)}"
        raise ConfigError(f"the environment of {environment} is missing", where, environments.remedy(environment))
    return torch_of(python)


def cuda_version(torch_folder: Path) -> int:
    """Return the CUDA version that a torch was built for, as CUDA counts it: 13000 for 13.0."""
    version = re.search(r"^cuda\b.*= '(\d+)\.(\d+)", (torch_folder / "version.py").read_text(), re.MULTILINE)
    return 1000 * int(version[1]) + 10 * int(version[2]) if version else 13000
