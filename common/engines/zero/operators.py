"""DeepSpeed's compiled operators: built once by `gptscale prepare`, only loaded by a run.

Left to itself DeepSpeed compiles an operator inside the run that first needs it, without a word, for minutes; a run killed
meanwhile leaves a file `lock` that every later one waits for without end. Here an operator is built aside, moved into place
when it is whole, and loaded from there: a run needs no compiler, takes no lock and cannot begin a compile.

The CPU builds are used on GPU machines too: they need no nvcc, and AdamW on the host and file I/O are what they are for.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from gptscale.common.engines.zero.io_meter import MeteredIO
from gptscale.common.errors import ConfigError, StorageError
from gptscale.ops.build import cache as build_cache

if TYPE_CHECKING:
    import torch

# In the order in which they must be loaded: async_io uses symbols of pin_memory.
# ABOUT_S: seconds seen on 2 cores (docs/measurements/LOG.md).
BUILDERS = {"cpu_adam": "CPUAdamBuilder", "pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}
ABOUT_S = {"cpu_adam": 40, "pin_memory": 10, "async_io": 150}
BUILD_TIMEOUT_S = 1800.0
LOCK_TIMEOUT_S = 30.0


def ops_path() -> Path:
    """Where this machine's builds for these versions lie, or would."""
    versions = "-".join(f"{name}{importlib.metadata.version(name)}" for name in ("deepspeed", "torch"))
    # Compiled for the very CPU (-march=native): a home folder may be shared with machines that have another.
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    cpu = next((line for line in lines if line.startswith("flags")), lines[0])
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return build_cache.root() / "ops" / f"{versions}-{python}-{hashlib.sha256(cpu.encode()).hexdigest()[:8]}"


def ops_folder() -> Path:
    """The same, made if it is not there, and private to the user (0700): what lies in it is executed by a run.

    Raises StorageError if it belongs to another user.
    """
    try:
        return build_cache.private(ops_path())
    except build_cache.CacheFolderError as error:
        raise StorageError(*error.args) from None


def library(op: str) -> Path:
    """The shared library of a built operator."""
    return ops_path() / op / f"{op}.so"


def missing(ops: Sequence[str]) -> list[str]:
    """Those of `ops` that are not built here."""
    return [op for op in ops if not library(op).exists()]


def lack(ops: Sequence[str]) -> ConfigError | None:
    """The error for those of `ops` that are not built here, with the line that changes it; None if all are."""
    if not (absent := missing(ops)):
        return None
    lacking = next((found for op in absent if (found := what_is_missing(op))), None)
    what = f"DeepSpeed's {' and '.join(absent)} not compiled yet" + (f": {lacking[0]}" if lacking else "")
    fix = f"{lacking[2]}, then gptscale prepare" if lacking else "run gptscale prepare (once, some minutes)"
    return ConfigError(what, "on this machine", fix)


def load(ops: Sequence[str]) -> None:
    """Load built operators and hand them to DeepSpeed, which then never builds one; async_io with its traffic metered."""
    if not ops:
        return
    ops_folder()  # still ours alone?
    from deepspeed.ops.op_builder.builder import OpBuilder

    for op in BUILDERS:
        if op in ops and op not in OpBuilder._loaded_ops:
            if op == "pin_memory":
                ctypes.CDLL(str(library(op)), mode=ctypes.RTLD_GLOBAL)
            module = _import(op, library(op))
            OpBuilder._loaded_ops[op] = MeteredIO(module) if op == "async_io" else module


def _import(op: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(op, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare(op: str, say: Callable[[str], object] = print) -> bool:
    """Build `op` unless it is there; whether it was built now. One process at a time: the kernel frees the lock of a dead one.

    Raises ConfigError with what is missing and the line that installs it, or with the compiler's own error.
    """
    if not missing([op]):
        return False
    if lacks := what_is_missing(op):
        raise ConfigError(*lacks)

    def build(work: Path) -> Path:
        say(f"compiling DeepSpeed's {op} (about {ABOUT_S[op]} s on 2 cores, once) ...")
        return _build(op, work)

    try:
        return build_cache.build_once(ops_folder() / op, build, say, wait_s=LOCK_TIMEOUT_S)
    except build_cache.BuildError as error:
        raise ConfigError(*error.args) from None


def _build(op: str, work: Path) -> Path:
    log = work / "log"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(work), "DS_ACCELERATOR": "cpu"}
    environment["PATH"] = build_cache.search_path()
    command = [sys.executable, "-m", "gptscale.common.engines.zero.operators", op]
    try:
        with log.open("w") as output:
            subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=BUILD_TIMEOUT_S, check=True)
    except subprocess.SubprocessError as error:
        lines = [x for x in log.read_text().splitlines() if "rror" in x] or [str(error)]
        raise ConfigError(
            f"DeepSpeed's {op} does not compile ({lines[0].strip()[:200]})",
            "in gptscale prepare",
            "see gptscale doctor",
        ) from error
    return work / op


def what_is_missing(op: str) -> tuple[str, str, str] | None:
    """What a compile of `op` would lack here: what, where, and the line that installs it."""
    if lacks := build_cache.tool_missing():
        return lacks[0], f"for DeepSpeed's {op}", lacks[1]
    if op == "async_io" and not _has_libaio():
        return "no libaio headers", f"for DeepSpeed's {op}", "apt-get install libaio-dev"
    return None


def _has_libaio() -> bool:
    """Whether a program with libaio's header compiles and links."""
    with tempfile.TemporaryDirectory() as folder:
        source = "#include <libaio.h>\nint main() { return io_setup(0, 0) > 0; }\n"
        command = [os.environ.get("CXX", "c++"), "-x", "c++", "-", "-laio", "-o", f"{folder}/probe"]
        return (
            subprocess.run(command, input=source.encode(), capture_output=True, timeout=60, check=False).returncode == 0
        )


def start_deepspeed(device: torch.device) -> None:
    """Start DeepSpeed so that it uses `device` and compiles nothing; call it inside an initialised process group."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if device.type == "cpu" and get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())  # it takes a GPU whenever it sees one
    # On CPUs it would compile, silently, a shared-memory all-reduce that only inference uses: no operator is "compatible".
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


if __name__ == "__main__":
    from deepspeed.ops.op_builder import cpu as builders

    getattr(builders, BUILDERS[sys.argv[1]])().load(verbose=True)
