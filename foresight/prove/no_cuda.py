"""The CPU in the place of CUDA, for a program that names it: tensors, models and process groups come to the CPU and gloo.

A program of somebody else reads a copy of this file (foresight/mock_cuda/on_path.py) in an environment without gptscale. So it
imports torch alone. It does nothing unless its starter asks for it.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


def on_cpu(value: Any) -> Any:
    """Return the CPU for a device of CUDA, and any other value as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")) else value


class CpuForCuda(TorchFunctionMode):
    """It turns each device of CUDA that a function of torch gets into the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory") and args and isinstance(args[0], torch.Tensor):
            return args[0]
        kwargs = {key: on_cpu(value) for key, value in (kwargs or {}).items()}
        # A bare number is a device of CUDA in `tensor.to(rank)`.
        numbered = name == "to" and len(args) > 1 and type(args[1]) is int
        args = (args[0], "cpu", *args[2:]) if numbered else tuple(on_cpu(value) for value in args)
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def begin(torch_module: Any) -> None:
    """Put the CPU in the place of CUDA in this program, which has just imported torch."""
    if not json.loads(os.environ["GPTSCALE_SIMULATED_PROGRAM"])["without_cuda"]:
        return
    CpuForCuda().__enter__()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.current_device = lambda: 0
    cuda.is_bf16_supported = lambda *args, **options: True
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "manual_seed",
        "manual_seed_all",
    ):
        setattr(cuda, name, lambda *args, **options: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **options: 0)
    torch.nn.Module.cuda = lambda self, *args, **options: self  # type: ignore[assignment, method-assign]
    to, initialise = torch.nn.Module.to, dist.init_process_group

    def module_to(self: Any, *args: Any, **options: Any) -> Any:
        options = {key: on_cpu(value) for key, value in options.items()}
        return to(self, *("cpu" if type(value) is int else on_cpu(value) for value in args), **options)

    def with_gloo(backend: Any = None, *args: Any, **options: Any) -> Any:
        options.pop("device_id", None)
        return initialise("gloo", *args, **options)

    torch.nn.Module.to = module_to  # type: ignore[assignment, method-assign]
    dist.init_process_group = with_gloo  # type: ignore[assignment]
    _forget_devices(torch.nn.parallel.DistributedDataParallel, "device_ids", "output_device")
    _first_on_cpu(torch, "autocast")
    mesh: Any = __import__("torch.distributed.device_mesh", fromlist=["init_device_mesh"])
    _first_on_cpu(mesh, "init_device_mesh")


def _forget_devices(owner: Any, *names: str) -> None:
    initialise = owner.__init__

    def without(self: Any, *args: Any, **options: Any) -> None:
        initialise(self, *args[:1], **{key: value for key, value in options.items() if key not in names})

    owner.__init__ = without


def _first_on_cpu(owner: Any, name: str) -> None:
    """Let a function, or a class, whose first argument names a kind of device, get the CPU."""
    original = getattr(owner, name)
    if isinstance(original, type):
        initialise = original.__init__
        original.__init__ = lambda self, device, *args, **options: initialise(self, on_cpu(device), *args, **options)
        return

    def named(device: Any, *args: Any, **options: Any) -> Any:
        return original(on_cpu(device), *args, **options)

    setattr(owner, name, named)
