"""The registration of the package's operators with torch.library, so that compile, export, AMP and opcheck accept them.

Each operator has a schema, a shape function and implementations. On a CPU the C++ kernel runs, and its bindings bring their
own autograd formulas. Where it cannot be compiled, the Python implementation and its formulas take its place. CUDA tensors
go to the Triton kernel, or to another module that the operator names for them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from gptscale.ops.build import kernels

LIBRARY = torch.library.Library("gptscale", "DEF")
# Registers each operator with C++ kernels, once it is known whether they are there.
_WAITING: list[Callable[[bool], None]] = []


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    python: Callable[..., Any],
    cuda: str,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    autocast: Callable[..., tuple[Any, ...]] | None = None,
    cpp: bool = True,
) -> None:
    """Register the operator `gptscale::<schema>`.

    fake: returns outputs of the right shape, dtype and strides for fake inputs.
    python: computes the result by torch's own operations.
    cuda: the module that has a function of the operator's name for CUDA tensors. It is imported at the first call.
    setup_context, backward: as for torch.library.register_autograd, for use without C++. The C++ bindings register the same
        formulas themselves.
    autocast: maps (dtype, *arguments) to the arguments that autocast should run the operator with.
    cpp: whether there is a C++ kernel. An operator without one, and without formulas, can be called before `ready`.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    torch.library.register_fake(f"gptscale::{name}", fake, lib=LIBRARY)
    if autocast is not None:
        for device in ("cpu", "cuda"):
            LIBRARY.impl(name, _under_autocast(name, device, autocast), "Autocast" + device.upper())

    def register(compiled: bool) -> None:
        LIBRARY.impl(name, _when_called(cuda, name), "CUDA")
        if not compiled:
            LIBRARY.impl(name, python, "CPU")
            if backward is not None:
                torch.library.register_autograd(f"gptscale::{name}", backward, setup_context=setup_context, lib=LIBRARY)

    if cpp:
        _WAITING.append(register)
    else:
        register(False)


def _when_called(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports `module` when it is called, because Triton may not be installed."""

    def run(*args: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args)

    return run


def _under_autocast(name: str, device: str, cast: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        args = cast(torch.get_autocast_dtype(device), *args)
        with torch.autocast(device, enabled=False):
            return getattr(torch.ops.gptscale, name)(*args)

    return run


def ready() -> bool:
    """Make the operators callable, compile them first if needed, and return whether they run in C++ on a CPU."""
    compiled = kernels.load()
    # Those whose module was imported since the last call.
    while _WAITING:
        _WAITING.pop()(compiled)
    return compiled


# Tells torch.compile to call `ready` once and not to look into it. The decorator for it, assume_constant_result, does this
# and no more, but imports torch._dynamo, and with it Triton.
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def require(implementation: str, device: torch.device, python: tuple[str, ...] = ("python",)) -> None:
    """Make the operators callable, and raise ValueError unless they can run by `implementation` on `device`.

    implementation: auto, cpp or triton. python: the names of the implementations in Python, which the caller has handled
    already and which appear in the message only.
    """
    if implementation not in ("auto", "cpp", "triton"):
        names = ", ".join(("auto", *python, "cpp", "triton"))
        raise ValueError(f"implementation: one of {names} expected, not {implementation!r}")
    if implementation == "triton" and device.type != "cuda":
        raise ValueError(f"implementation: triton needs tensors on a CUDA device, not on {device}")
    if implementation == "cpp" and device.type != "cpu":
        raise ValueError(f"implementation: cpp needs tensors on the CPU, not on {device}")
    if not ready() and implementation == "cpp":
        raise ValueError("implementation: the C++ operators are not compiled here; gptscale doctor says why")
