"""DeepSpeed's compiled operators, which `gptscale prepare` builds once and a run only loads, and DeepSpeed's start.

By itself DeepSpeed compiles an operator inside the run that first needs it, silently, for minutes. A run that is killed in
that time leaves a file `lock`, for which every later run waits without end. Here an operator is built in a folder of its own,
moved into place when it is complete, and loaded from there. So a run needs no compiler, takes no lock and starts no compile.

GPU machines use the CPU builds too. These need no nvcc, and the operators are for AdamW on the host and for file I/O.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
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
# ABOUT_S: seconds of one core (docs/measurements/LOG.md).
BUILDERS = {"cpu_adam": "CPUAdamBuilder", "pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}
ABOUT_S = {"cpu_adam": 50, "pin_memory": 35, "async_io": 45}
BUILD_TIMEOUT_S = 1800.0


def ops_path() -> Path:
    """Return the folder of this machine's builds for these versions, whether or not it exists."""
    versions = "-".join(f"{name}{importlib.metadata.version(name)}" for name in ("deepspeed", "torch"))
    # The builds are for this CPU only (-march=native), and machines with other CPUs may share the home folder.
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line for line in lines if line.startswith("flags")), lines[0])
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return build_cache.root() / "ops" / f"{versions}-{python}-{hashlib.sha256(cpu.encode()).hexdigest()[:8]}"


def library(op: str) -> Path:
    """Return the path of the shared library of an operator."""
    return ops_path() / op / f"{op}.so"


def missing(ops: Sequence[str]) -> list[str]:
    """Return those of `ops` that are not built here."""
    return [op for op in ops if not library(op).exists()]


def lack(ops: Sequence[str]) -> ConfigError | None:
    """Return the error for those of `ops` that are not built here, or that others may have changed. None if all is well."""
    try:
        absent = missing(ops)
        for op in set(ops) - set(absent):
            build_cache.check_private(library(op))
    except build_cache.CacheFolderError as error:
        return ConfigError(*error.args)
    if not absent:
        return None
    names = f"DeepSpeed's {' and '.join(absent)} not compiled yet"
    for op in absent:
        if reason := what_is_missing(op):
            return ConfigError(f"{names}: {reason[0]}", "on this machine", f"{reason[2]}, then gptscale prepare")
    return ConfigError(names, "on this machine", "run gptscale prepare (once, some minutes)")


def load(ops: Sequence[str]) -> None:
    """Load built operators and register them with DeepSpeed, which then never builds one.

    The traffic of async_io is metered. Raises StorageError if others could have written one of the libraries.
    """
    if not ops:
        return
    _check_private(ops)
    from deepspeed.ops.op_builder.builder import OpBuilder

    for op in BUILDERS:
        if op in ops and op not in OpBuilder._loaded_ops:
            if op == "pin_memory":
                ctypes.CDLL(str(library(op)), mode=ctypes.RTLD_GLOBAL)
            module = _import(op, library(op))
            OpBuilder._loaded_ops[op] = MeteredIO(module) if op == "async_io" else module


def _check_private(ops: Sequence[str]) -> None:
    """Raise StorageError if another user could have written one of the libraries."""
    try:
        for op in ops:
            build_cache.check_private(library(op))
    except build_cache.CacheFolderError as error:
        raise StorageError(*error.args) from None


def _import(op: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(op, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare(op: str, say: Callable[[str], object] = print) -> bool:
    """Build `op` unless it is there, and return whether it was built now.

    One process at a time builds; the kernel frees the lock of a process that dies. Raises ConfigError with what is missing and
    the command that installs it, or with the compiler's own error.
    """
    _check_private([op])
    if not missing([op]):
        return False
    if reason := what_is_missing(op):
        raise ConfigError(*reason)

    # It is linked with pin_memory, and its own builder would compile that a second time.
    if op == "async_io":
        prepare("pin_memory", say)

    def build(work: Path) -> Path:
        say(f"compiling DeepSpeed's {op} (about {ABOUT_S[op]} s, once) ...")
        return _build(op, work)

    try:
        return build_cache.build_once(ops_path() / op, build, say)
    except build_cache.BuildError as error:
        raise ConfigError(*error.args) from None


def _build(op: str, work: Path) -> Path:
    command = [sys.executable, "-Pm", "gptscale.common.engines.zero.operators", op]
    variables = {"TORCH_EXTENSIONS_DIR": str(work), "DS_ACCELERATOR": "cpu"}
    if reason := build_cache.compile_apart(command, work, timeout_s=BUILD_TIMEOUT_S, **variables):
        raise ConfigError(f"DeepSpeed's {op} does not compile ({reason})", "in gptscale prepare", "see gptscale doctor")
    return work / op


def what_is_missing(op: str) -> tuple[str, str, str] | None:
    """Return why `op` cannot be compiled here, as the three texts of a ConfigError, or None if it can."""
    if tool := build_cache.tool_missing():
        return tool[0], f"for DeepSpeed's {op}", tool[1]
    if op == "async_io" and not _has_libaio():
        return "no libaio headers", f"for DeepSpeed's {op}", "apt-get install libaio-dev"
    return None


def _has_libaio() -> bool:
    """Return whether a program with libaio's header compiles and links."""
    with tempfile.TemporaryDirectory() as folder:
        source = "#include <libaio.h>\nint main() { return io_setup(0, 0) > 0; }\n"
        command = [os.environ.get("CXX", "c++"), "-x", "c++", "-", "-laio", "-o", f"{folder}/probe"]
        ended = subprocess.run(command, input=source.encode(), capture_output=True, timeout=60, check=False)
        return ended.returncode == 0


def start_deepspeed(device: torch.device) -> None:
    """Start DeepSpeed inside an initialised process group, so that it uses `device` and compiles nothing."""
    import deepspeed

    importlib.import_module("gptscale.common.engines.zero.library")
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    # By itself it takes a GPU whenever it sees one.
    if device.type == "cpu" and get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())
    # With no operator "compatible" it does not compile, silently, a shared-memory all-reduce for CPUs. Only inference uses it.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _compile(op: str) -> None:
    """Compile `op` with DeepSpeed's builder, and import it."""
    from deepspeed.ops.op_builder import cpu as builders

    if op == "async_io":
        load(["pin_memory"])
    builder = getattr(builders, BUILDERS[op])()
    # Nobody debugs these libraries, and writing the tables for a debugger takes time.
    flags = [flag for flag in builder.cxx_args() if flag != "-g"]
    copy = _guarded_copy(Path(builder.deepspeed_src_path("csrc")))
    # Each source reads torch's headers, which is most of its compile, so they are read once. Those in `common` read none, and
    # define the same names.
    apart = [str(copy / source) for source in builder.sources() if "/common/" in source]
    together = [source for source in builder.sources() if "/common/" not in source]
    (copy / "together.cpp").write_text("".join(f'#include "{source}"\n' for source in together))
    folders = [str(copy / folder) for folder in builder.include_paths()]
    builder.cxx_args, builder.include_paths = lambda: flags, lambda: folders
    builder.sources = lambda: [str(copy / "together.cpp"), *apart]
    builder.load(verbose=True)


def _guarded_copy(sources: Path) -> Path:
    """Copy DeepSpeed's sources into the folder of the build and return where the copy is. A header counts once there."""
    copy = Path(os.environ["TORCH_EXTENSIONS_DIR"], "sources")
    shutil.copytree(sources, copy / sources.name)
    for header in copy.rglob("*.h"):
        header.write_text(f"#pragma once\n{header.read_text()}")
    return copy


if __name__ == "__main__":
    _compile(sys.argv[1])
