"""The registration of the package's operators with torch.library, so that compile, export, AMP and opcheck accept them.

Each operator has a schema, a shape function and implementations. On a CPU the C++ kernel runs, and its bindings bring their
own autograd formulas. Where it cannot be compiled, the Python implementation and its formulas take its place. CUDA tensors
go to the Triton kernel, or to another module that the operator names for them, and those in fp64 to the Python implementation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from gptscale.ops.build import kernels

LIBRARY = torch.library.Library("gptscale", "DEF")
# Registers each operator with C++ kernels, once it is known whether they are there.
_WAITING: list[Callable[[bool], None]] = []
# The implementations in Python of each operator.
IN_PYTHON: dict[str, tuple[str, ...]] = {}


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    python: Mapping[str, Callable[..., Any]],
    cuda: str,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    autocast: Callable[..., tuple[Any, ...]] | None = None,
) -> None:
    """Register the operator `gptscale::<schema>`, and `gptscale::<name>_<by>` for each implementation in Python.

    fake: returns outputs of the right shape, dtype and strides for fake inputs.
    python: the implementations by torch's own operations, by name. That called `python` runs where there is no kernel, too.
    cuda: the module that has a function of the operator's name for CUDA tensors. It is imported at the first call.
    setup_context, backward: as for torch.library.register_autograd, but `backward` is given first what `partial(named, by=...)`
        returns, to call operators by the same implementation. The C++ bindings register the same formulas themselves.
    autocast: maps (dtype, *arguments) to the arguments that autocast should run the operator with.
    """
    name, arguments = schema.split("(", 1)

    def declare(full_name: str) -> None:
        LIBRARY.define(f"{full_name}({arguments}")
        torch.library.register_fake(f"gptscale::{full_name}", fake, lib=LIBRARY)
        if autocast is not None:
            for device in ("cpu", "cuda"):
                LIBRARY.impl(full_name, _under_autocast(full_name, device, autocast), "Autocast" + device.upper())

    def differentiate(full_name: str, by: str) -> None:
        formula = partial(backward, partial(named, by=by))
        torch.library.register_autograd(f"gptscale::{full_name}", formula, setup_context=setup_context, lib=LIBRARY)

    def register(compiled: bool) -> None:
        LIBRARY.impl(name, _on_cuda(cuda, name, python["python"]), "CUDA")
        if not compiled:
            LIBRARY.impl(name, python["python"], "CPU")
            differentiate(name, "auto")

    declare(name)
    _WAITING.append(register)
    IN_PYTHON[name] = tuple(python)
    for by, function in python.items():
        declare(f"{name}_{by}")
        LIBRARY.impl(f"{name}_{by}", function, "CompositeExplicitAutograd")
        differentiate(f"{name}_{by}", by)


def named(name: str, by: str) -> Any:
    """Return an operator by an implementation, which `chosen` has checked."""
    return getattr(torch.ops.gptscale, f"{name}_{by}" if by in IN_PYTHON[name] else name)


def chosen(name: str, implementation: str, device: torch.device) -> Any:
    """Return an operator by an implementation, or raise ValueError unless it can run so on `device`.

    implementation: auto, cpp, triton or one in Python. All but the last make the operators callable.
    """
    python = IN_PYTHON[name]
    if implementation not in ("auto", "cpp", "triton", *python):
        names = ", ".join(("auto", *python, "cpp", "triton"))
        raise ValueError(f"implementation: one of {names} expected, not {implementation!r}")
    if implementation == "triton" and device.type != "cuda":
        raise ValueError(f"implementation: triton needs tensors on a CUDA device, not on {device}")
    if implementation == "cpp" and device.type != "cpu":
        raise ValueError(f"implementation: cpp needs tensors on the CPU, not on {device}")
    if implementation not in python and not ready() and implementation == "cpp":
        raise ValueError("implementation: the C++ operators are not compiled here; gptscale doctor says why")
    return named(name, implementation)


def _on_cuda(module: str, name: str, in_python: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that imports `module` when it is called, because Triton may not be installed."""

    def run(*args: Any) -> Any:
        # fp64 is for checking and not for speed, so torch's own operations compute it.
        if args[0].dtype == torch.float64:
            return in_python(*args)
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
