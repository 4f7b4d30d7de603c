"""A user's model without the values of its weights: with two blocks of each list for a proof, with all for a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gptscale.common.model.own import weights_on_meta

FILLS = {"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_", "exponential_", "erfinv_"}
KEPT = 2
# Where rounding alone turns the gradient of an element on or off.
KINKED = {"relu", "relu6", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "threshold", "prelu"}
MAXIMA = {f"max_pool{n}d" for n in (1, 2, 3)}

# Where `moved` moves to in this process. A program has a device of its own.
DEVICE = "cpu"


class NoFills(TorchFunctionMode):
    """Skip every call that fills a tensor with random values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in FILLS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


class Smooth(TorchFunctionMode):
    """Replace ReLU and its like by smooth functions: at a kink two right programs differ by more than rounding."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = getattr(function, "__name__", "").strip("_"), kwargs or {}
        if name in KINKED:
            return functional.gelu(args[0])
        if name in MAXIMA and not options.get("return_indices"):
            sizes = {key: options[key] for key in ("kernel_size", "stride", "padding", "ceil_mode") if key in options}
            return getattr(functional, name.replace("max", "avg"))(*args[:4], **sizes)
        return function(*args, **options)


class InDouble(Smooth):
    """Compute in double precision what a program computes in single: its rounding is then far below any fault."""

    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if getattr(function, "__name__", "") == "float" else function
        args = [torch.float64 if each is torch.float32 else each for each in args]
        options = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return super().__torch_function__(function, types, args, options)


@contextmanager
def on_meta() -> Iterator[None]:
    """Give weights their shapes, but no memory. Buffers are as their modules make them. Raises ValueError for weights of meta."""
    seen: list[bool] = []

    def wanted(parameter: nn.Parameter) -> bool:
        # Only the first tells: weight_norm computes its weights from one that has been emptied.
        seen.append(parameter.is_meta)
        if seen[0]:
            raise ValueError("its weights are on the meta device, and have no values to begin with")
        # One of integers keeps its values, as a buffer does.
        return parameter.is_floating_point()

    with NoFills(), weights_on_meta(wanted):
        yield


def blocks_of(model: nn.Module) -> list[str]:
    """Return the classes of the blocks: each repeats, in a list if there is one. The first has the most weights.

    Others are those of stacks beside it that have a tenth of the weights, such as the encoder's.
    """
    total = sum(p.numel() for p in model.parameters())
    containers = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    listed = [child for module in model.modules() if isinstance(module, containers) for child in module.children()]
    for modules in (listed, [*model.modules()]):
        weights, count = Counter[str](), Counter[str]()
        for module in modules:
            if any(True for _ in module.children()) and not isinstance(module, containers):
                weights[type(module).__name__] += sum(p.numel() for p in module.parameters())
                count[type(module).__name__] += 1
        # An attention has fewer weights than the block around it.
        repeated = [name for name, n in weights.most_common() if n and count[name] > 1]
        if found := repeated[:1]:
            for name in (name for name in repeated[1:] if 10 * weights[name] >= total):
                if not any(_within(model, *pair) for each in found for pair in ((each, name), (name, each))):
                    found.append(name)
            return found
    return []


def _within(model: nn.Module, outer: str, inner: str) -> bool:
    """Return whether a module of one class has one of another within it."""
    outers = (module for module in model.modules() if type(module).__name__ == outer)
    return any(type(module).__name__ == inner for each in outers for module in each.modules())


def two_blocks(build: Callable[[], nn.Module], blocks: Collection[str]) -> nn.Module:
    """Build a model with two blocks of each list, and random weights."""
    with on_meta():
        model = build()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and type(module[0]).__name__ in blocks:
            del module[KEPT:]
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for values in (vars(module)["_parameters"], vars(module)["_buffers"]):
            for name, value in values.items():
                if value is not None and value.is_meta:
                    values[name] = made.setdefault(id(value), _filled(value))
    return model


def moved(value: Any) -> Any:
    """Return lists and dictionaries with all that they hold on the device."""
    if isinstance(value, dict):
        return {name: moved(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [moved(each) for each in value]
    return value.to(DEVICE) if hasattr(value, "to") else value


def widen(model: torch.nn.Module) -> None:
    """Give each scalar a dimension of one element: `fully_shard` takes no scalars."""
    for module in model.modules():
        for name, p in [*module.named_parameters(recurse=False)]:
            if not p.dim():
                setattr(module, name, torch.nn.Parameter(p.detach().reshape(1), p.requires_grad))


def touch(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    """Give each whole weight a gradient, if only of zeros: another rank may use what this one does not."""
    zero = 0 * sum(p.flatten()[0] for p in module.parameters() if not isinstance(p, DTensor))
    return output + zero if isinstance(output, torch.Tensor) else (output[0] + zero, *output[1:])


def _filled(tensor: Tensor) -> Tensor:
    """Return a weight, or a buffer made of one, with values: a matrix of small ones, a vector near one, as norms have it."""
    values = torch.randn(tensor.shape, dtype=tensor.dtype)
    values = 0.05 * values if tensor.dim() > 1 else 1 + 0.05 * values
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
