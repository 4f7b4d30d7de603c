"""Compilation of a model's blocks by torch.compile."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import CUDA_GRAPHS


def check_compile(run: Run) -> None:
    """Raise ConfigError for a mode without compilation, for CUDA graphs without CUDA, and for a cache that others may write."""
    mode, where = run.config.compile_mode, "in --compile-mode"
    if mode != "default" and not run.config.compile:
        raise ConfigError(f"compile_mode {mode} without compile means nothing", where, "add --compile")
    if mode in CUDA_GRAPHS and run.world.device.type != "cuda":
        raise ConfigError(f"compile_mode {mode} needs CUDA", where, "use max-autotune-no-cudagraphs or default")
    if run.config.compile:
        check_cache(cache_folder(), "TORCHINDUCTOR_CACHE_DIR")
        # By itself torch gives Triton a folder in its own. Our kernels, which have none, keep theirs in Triton's.
        if (named := os.environ.get("TRITON_CACHE_DIR")) or run.world.device.type == "cuda":
            home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
            check_cache(Path(named or Path(home) / ".triton" / "cache"), "TRITON_CACHE_DIR")


def cache_folder() -> Path:
    """Return the folder in which torch.compile keeps what it compiles, and from which it loads code and runs it."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return Path(named or Path(tempfile.gettempdir()) / f"torchinductor_{user}")


def check_cache(folder: Path, variable: str) -> None:
    """Raise ConfigError if another user could have put code into the cache that `variable` names.

    torch's lies in /tmp by default, where anybody may make a folder of its name first. A cache that does not exist is made here,
    for this user alone.
    """
    from gptscale.ops.build.cache import CacheFolderError, check_private

    folder = folder.absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder, folder, variable, whole=True)
    except OSError as error:
        fix = f"set {variable} to a folder of your own"
        raise ConfigError(f"torch cannot keep compiled code ({error})", "in --compile", fix) from None
    except CacheFolderError as error:
        raise ConfigError(*error.args) from None


def apply_compile(blocks: Iterable[nn.Module], mode: str = "default") -> None:
    """Compile the forward of each block, in place.

    A block is one small graph. It is compiled once and shared by all blocks of the same shapes. Parameter names do not change.
    mode: as in torch.compile. With one of CUDA_GRAPHS the engine must call torch.compiler.cudagraph_mark_step_begin() before each
    step, since the outputs of a block, among them gradients of weights, lie where those of the next step will.
    """
    try_instruction_sets_without_torch()
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, mode=mode)


# Where this fails, what torch itself would have tried decides.
TRY_LOADING = """
from ctypes import CDLL
try:
    CDLL("{torch}")
    CDLL("__lib_path__")
except OSError:
    import torch
    CDLL("__lib_path__")
"""


def try_instruction_sets_without_torch() -> None:
    """Have torch try out the instruction sets of this processor without importing torch for each.

    For each set torch compiles a small library, once. Every process that compiles tries in a new Python whether it loads. That
    Python imports torch, for seconds. The one library of torch that it needs is enough.
    """
    from torch._inductor import cpu_vec_isa

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    cpu_vec_isa.VecISA._avx_py_load = TRY_LOADING.replace("{torch}", str(library))
