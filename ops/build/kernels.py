"""The compiled kernels: built when the package was installed, or at first use, or not at all; `implementation()` tells which."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from gptscale.common.errors import ConfigError, StorageError
from gptscale.ops.build import cache as build_cache
from gptscale.ops.build.sources import FLAGS, fingerprint, sources

ABOUT_S = 60  # seen on 2 cores, docs/measurements/LOG.md
BUILD_TIMEOUT_S = 1800.0


def built_ahead() -> Path | None:
    """What an install compiled for these very sources and this very torch; an older build is not looked at."""
    return next(Path(__file__).parents[1].glob(f"_kernels_{fingerprint(torch.__version__)}*.so"), None)


def cached() -> Path:
    """Where the build of an earlier first use lies, or would."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return build_cache.root() / "ops" / f"kernels-{fingerprint(torch.__version__)}-{python}" / "kernels.so"


def prepare(say: Callable[[str], object] = print) -> bool:
    """Compile the kernels unless they are there; whether they were compiled now.

    Raises ConfigError with what is missing and the line that installs it, or with the compiler's own error; StorageError
    if the cache is another user's.
    """
    if built_ahead() or cached().exists():
        return False
    if lacks := build_cache.tool_missing():
        raise ConfigError(lacks[0], "for the C++ operators", lacks[1])

    def build(work: Path) -> Path:
        say(f"compiling the C++ operators (about {ABOUT_S} s on 2 cores, once) ...")
        return _build(work)

    return build_cache.build_once(cached().parent, build, say, wait_s=BUILD_TIMEOUT_S)


def _build(work: Path) -> Path:
    """In a process of its own, with its output kept for the error message; the folder that holds kernels.so."""
    log = work / "log"
    environment = {**os.environ, "PATH": build_cache.search_path()}
    command = [sys.executable, "-m", "gptscale.ops.build.kernels", str(work)]
    with log.open("w") as output:
        ended = subprocess.run(
            command, env=environment, stdout=output, stderr=output, timeout=BUILD_TIMEOUT_S, check=False
        )
    if ended.returncode:
        lines = [line for line in log.read_text().splitlines() if "error" in line.lower()] or ["see the compiler"]
        raise ConfigError(
            f"the C++ operators do not compile ({lines[0].strip()[:200]})", "with this compiler", "see gptscale doctor"
        )
    return work


def compile_into(folder: Path) -> None:
    """Compile kernels.so in `folder`, by torch.utils.cpp_extension."""
    from torch.utils import cpp_extension

    cpp_extension.load(
        "kernels",
        [str(path) for path in sources()],
        extra_cflags=FLAGS,
        extra_ldflags=["-fopenmp"],
        build_directory=str(folder),
        is_python_module=False,
        with_cuda=False,
        verbose=True,
    )


@cache
def load() -> bool:
    """Load the kernels, compiling them first if they are not there; whether they are there now.

    Without a compiler, or with one that fails, one line on stderr says so, once per process, and the operators run in
    Python.
    """
    try:
        if not (built_ahead() or cached().exists()):
            prepare(lambda line: print(f"gptscale: {line}", file=sys.stderr, flush=True))
        library = built_ahead()
        if library is None:
            build_cache.private(cached().parent)  # still ours alone?
            library = cached()
    except (ConfigError, StorageError) as error:
        print(f"gptscale: operators run in Python, many times slower: {error}", file=sys.stderr, flush=True)
        return False
    torch.ops.load_library(str(library))
    return True


def implementation() -> str:
    """What the operators would use on a CPU now, without building anything: for `gptscale doctor`."""
    if ahead := built_ahead():
        return f"C++, compiled when installed ({ahead.name})"
    if cached().exists():
        return f"C++, compiled at first use ({cached().parent})"
    if lacks := build_cache.tool_missing():
        return f"Python, many times slower: {lacks[0]}; {lacks[1]}, then gptscale prepare"
    return "not compiled yet: gptscale prepare, or their first use, does it"


if __name__ == "__main__":
    compile_into(Path(sys.argv[1]))
