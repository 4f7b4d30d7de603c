"""Do once what DeepSpeed would do again and again: imports in every rank, and a process started at every collective.

When DeepSpeed is given an optimizer it imports its Muon, which calls torch.compile for three functions and so imports all of
Inductor: 1.6 s of processor time in each rank. Nothing here trains with Muon, which works uncompiled too.

On a CPU it counts the devices at every bucket of ZeRO 3, and starts `numactl` each time, 26 times a step with four layers.

Import this module behind `deepspeed`: whoever imports only `gptscale.common` gets no DeepSpeed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys

if "deepspeed" in sys.modules:
    from deepspeed.runtime import compiler
    from deepspeed.utils import numa

    numa.get_numa_cores = functools.cache(numa.get_numa_cores)
    _compile = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        with contextlib.suppress(ImportError):
            # DeepSpeed suppresses it too.
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = _compile
