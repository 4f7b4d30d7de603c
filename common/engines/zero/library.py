"""Spare each rank DeepSpeed's slow imports and the processes that DeepSpeed starts to ask about the CPU.

When DeepSpeed is given an optimizer it imports its Muon, which calls torch.compile for three functions and so imports all of
Inductor: 1.6 s of processor time in each rank. Nothing here trains with Muon, which works uncompiled too.

It imports its parts for mixtures of experts too, at each start of an engine.

On a CPU it counts the devices at every bucket of ZeRO 3, and starts `numactl` each time, 26 times a step with four layers.
Before its optimizer for the host it asks py-cpuinfo who made the CPU, for a warning that recipes leave out. That starts two
interpreters: 0.4 s of processor time in each rank, and up to 2 s of waiting.

Import this module behind `deepspeed`: whoever imports only `gptscale.common` gets no DeepSpeed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys

if "deepspeed" in sys.modules:
    import cpuinfo
    from deepspeed.runtime import compiler
    from deepspeed.utils import numa

    numa.get_numa_cores = functools.cache(numa.get_numa_cores)
    cpuinfo.get_cpu_info = dict
    _compile = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        with contextlib.suppress(ImportError):
            # DeepSpeed suppresses it too.
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = _compile
    for part in ("config", "layer"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"deepspeed.module_inject.auto_ep_{part}")
