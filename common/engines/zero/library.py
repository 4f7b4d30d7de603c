"""Import what DeepSpeed would import in every rank at its start, once and without what is of no use.

When DeepSpeed is given an optimizer it imports its Muon, which calls torch.compile for three functions and so imports all of
Inductor: 1.6 s of processor time in each rank. Nothing here trains with Muon, which works uncompiled too. Import this module
behind `deepspeed`: whoever imports only `gptscale.common` gets no DeepSpeed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

if "deepspeed" in sys.modules:
    from deepspeed.runtime import compiler

    _compile = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        with contextlib.suppress(ImportError):  # which DeepSpeed suppresses too
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = _compile
