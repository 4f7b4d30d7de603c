"""The compiled kernels: where they lie, and how they are built and loaded.

They are built when the package is installed, or at their first use. Without a compiler they are not built at all, and the
operators run in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from gptscale.ops.build import cache as build_cache
from gptscale.ops.build.cache import BuildError
from gptscale.ops.build.sources import FLAGS, fingerprint, sources

# seconds, measured on 2 cores
ABOUT_S = 30
BUILD_TIMEOUT_S = 1800.0


def built_ahead() -> Path | None:
    """Return the library that an install compiled for exactly these sources and this torch, or None."""
    return next(Path(__file__).parents[1].glob(f"_kernels_{fingerprint(torch.__version__)}*.so"), None)


def cached() -> Path:
    """Return the place of the library that a first use compiles, whether it is there or not."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return build_cache.root() / "ops" / f"kernels-{fingerprint(torch.__version__)}-{python}" / "kernels.so"


def prepare(say: Callable[[str], object] = print) -> bool:
    """Compile the kernels unless they are there, and return whether this call compiled them.

    Raises BuildError with the missing tool and the line that installs it, or with the compiler's own error;
    CacheFolderError if other users could have put something into the cache.
    """
    if built_ahead():
        return False
    build_cache.check_private(cached())
    if cached().exists():
        return False
    if missing := build_cache.tool_missing():
        raise BuildError(missing[0], "for the C++ operators", missing[1])

    def build(work: Path) -> Path:
        say(f"compiling the C++ operators (about {ABOUT_S} s on 2 cores, once) ...")
        command = [sys.executable, "-Pm", "gptscale.ops.build.kernels", str(work)]
        if reason := build_cache.compile_apart(command, work, timeout_s=BUILD_TIMEOUT_S):
            what = f"the C++ operators do not compile ({reason})"
            raise BuildError(what, "with this compiler", "see gptscale doctor")
        return work

    return build_cache.build_once(cached().parent, build, say)


@cache
def load() -> bool:
    """Load the kernels, compile them first if they are not there, and return whether they are loaded.

    Without a compiler, or with one that fails, one line on stderr says so, once per process, and the operators run in
    Python.
    """
    try:
        prepare(lambda line: print(f"gptscale: {line}", file=sys.stderr, flush=True))
        library = built_ahead() or cached()
    except BuildError as error:
        print(f"gptscale: operators run in Python, many times slower: {error}", file=sys.stderr, flush=True)
        return False
    torch.ops.load_library(str(library))
    return True


def implementation() -> str:
    """Say what the operators would use on a CPU now, without building anything, for `gptscale doctor`."""
    if library := built_ahead():
        return f"C++, compiled when installed ({library.name})"
    try:
        build_cache.check_private(cached())
    except BuildError as error:
        return f"Python, many times slower: {error}"
    if cached().exists():
        return f"C++, compiled at first use ({cached().parent})"
    if missing := build_cache.tool_missing():
        return f"Python, many times slower: {missing[0]}; {missing[1]}, then gptscale prepare"
    return "not compiled yet: gptscale prepare, or their first use, does it"


# Compile kernels.so in the folder that the command line names.
if __name__ == "__main__":
    from torch.utils import cpp_extension

    cpp_extension.load(
        "kernels",
        [str(path) for path in sources()],
        extra_cflags=FLAGS,
        extra_ldflags=["-fopenmp"],
        build_directory=sys.argv[1],
        is_python_module=False,
        with_cuda=False,
        verbose=True,
    )
