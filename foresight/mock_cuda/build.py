"""The mock's library: compiled once for each torch, into the cache of compiled code."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from gptscale.common.errors import ConfigError
from gptscale.ops.build.cache import BuildError, build_once, check_private, compile_apart, private, root

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libgptscale_mock_cuda.so"
# Kernels compiled under the mock were tuned by times that mean nothing. No real run may find them.
COMPILED = "compiled"
# NVRTC is opened by its name, which its library has to have, for each version of CUDA.
NVRTC = "libnvrtc.so.{}"
NVRTC_VERSIONS = (12, 13)
FLAGS = "-shared -fPIC -O1 -fvisibility=hidden -std=gnu11"
# The part of torch that calls CUDA. Each call that it could make and the mock lacks is made to say so.
CALLERS = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so")
# A call that the mock lacks returns "not supported" in the words of its library, which torch turns into an error.
REFUSALS = {"cudnn": 3000, "cublas": 15, "cusolver": 9, "cusparse": 10, "cufft": 16, "nccl": 3, "cuda": 801}
NM_S = 120


def prepare(torch_lib: Path) -> Path:
    """Compile the mock for the torch whose libraries are in `torch_lib`, unless that was done, and return its library.

    Raises ConfigError without a compiler, where it fails, or if another user could have written a file of it, or of COMPILED
    beside it.
    """
    sources = [Path(__file__), *sorted(SOURCES.glob("*.[ch]"))]
    digest = hashlib.sha256(b"\0".join([FLAGS.encode(), *(path.read_bytes() for path in sources)]))
    digest.update("".join(f"{name} {(torch_lib / name).stat().st_size}" for name in CALLERS).encode())
    folder = root() / "foresight" / f"mock-cuda-{digest.hexdigest()[:12]}"
    try:
        build_once(folder, lambda work: _compile(work, torch_lib))
        for each in (folder, private(folder.with_name(COMPILED))):
            check_private(each, whole=True)
    except BuildError as error:
        raise ConfigError(*error.args) from None
    return folder / LIBRARY


def _compile(work: Path, torch_lib: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BuildError("no C compiler", "for the mock of CUDA", "apt-get install gcc")
    out = work / "out"
    out.mkdir(mode=0o700)

    def link(target: Path, sources: list[Path], *flags: str) -> None:
        words = [*shlex.split(FLAGS), f"-I{SOURCES}", *flags, "-o", target, *sources, "-ldl", "-lpthread"]
        if reason := compile_apart([compiler, *map(str, words)], work, timeout_s=300):
            raise BuildError(f"the mock of CUDA does not compile ({reason})", f"with {compiler}", "apt-get install gcc")

    nvrtc = SOURCES / "nvrtc.c"
    files = sorted({*SOURCES.glob("*.c")} - {nvrtc})
    link(work / "first.so", files)
    (work / "lacking.c").write_text(_lacking(work / "first.so", torch_lib))
    link(out / LIBRARY, [*files, work / "lacking.c"])
    for version in NVRTC_VERSIONS:
        link(out / NVRTC.format(version), [nvrtc], f"-Wl,-soname,{NVRTC.format(version)}")
    # Triton 3.2 and 3.3 link with libcuda.so. A symbolic link could lead to what others planted.
    for name in ("libcuda.so", "libcuda.so.1"):
        (out / name).hardlink_to(out / LIBRARY)
    return out


def _lacking(library: Path, torch_lib: Path) -> str:
    """Return the C source of every call that torch could make and the mock lacks. Each names itself and fails."""
    defined = _symbols(library, "--defined-only")
    lines = ['#include "mock.h"']
    for name in sorted({name for file in CALLERS for name in _symbols(torch_lib / file, "--undefined-only")} - defined):
        refusal = next((code for prefix, code in REFUSALS.items() if name.startswith(prefix)), None)
        if refusal is not None:
            lines.append(f'API int {name}(void) {{ return missing("{name}", {refusal}); }}')
    return "\n".join([*lines, ""])


def _symbols(library: Path, which: str) -> set[str]:
    nm = shutil.which("nm")
    if nm is None:
        raise BuildError("no nm", "for the mock of CUDA", "apt-get install binutils")
    output = subprocess.run([nm, "-D", which, str(library)], capture_output=True, text=True, timeout=NM_S, check=False)
    return set(re.findall(r"[A-Z] (\w+)(?:@\S+)?$", output.stdout, re.MULTILINE))
