"""Balanced routes of experts, for --balanced-experts: tokens are dealt in turn, and what follows from that is computed.

Under the mock each score is zero and no kernel runs, so a router's choice means nothing. Here what a topk, a sort or a maximum
over experts chooses is dealt in turn. The mock's device is memory of this process: integers and masks there are computed by its
processor, as if all other values were zero. So counts, orders and splits of tokens are those of a balanced step.

The program reads a copy of this file (on_path.py) in an environment without gptscale. So it imports torch alone.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

PLAIN = (Tensor, torch.nn.Parameter)
MASKED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
ROUTERS = ("topk", "argmax", "max", "sort")
# More experts than a model has, and fewer than words: the most likely word of a vocabulary is no route.
EXPERTS_MAX = 1024
# A larger mask is one of attention.
INTEGERS_MAX = 2**26


class BalancedExperts(_python_dispatch.TorchDispatchMode):
    """It deals tokens to experts. dealt: how often, for each number of experts."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.dealt: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if any(issubclass(kind, FakeTensor | FunctionalTensor) for kind in types):
            # It only asks for shapes, or is compiled: a mode below answers.
            return func(*args, **options)
        if any(kind not in PLAIN for kind in types):
            return NotImplemented
        inputs = _on_device((args, options))
        if not isinstance(func, torch._ops.OpOverload) or not (inputs or "device" in options):
            return func(*args, **options)
        name = func._schema.name.partition("::")[2]
        if name == "masked_select" and inputs:
            values, mask = torch.broadcast_tensors(*args)
            func, name, args = torch.ops.aten.index.Tensor, "index", (values, [mask])
        if name in MASKED and inputs:
            # The device can use numbers by itself, where a mask has to be counted.
            masks = (
                _on_host(i).nonzero(as_tuple=True) if i is not None and i.dtype == torch.bool else [i] for i in args[1]
            )
            args = (args[0], [i if i is None else i.to(inputs[0].device) for each in masks for i in each], *args[2:])
        elif torch.Tag.dynamic_output_shape in func.tags and inputs:
            values = func(*_on_host(args), **_on_host(options))
            return _write(tree_map_only(Tensor, lambda v: torch.empty_like(v, device=inputs[0].device), values), values)
        result = func(*args, **options)
        outputs = _on_device(result)
        integers = [tensor for tensor in outputs if _is_integer(tensor)]
        if "c10d" in func.namespace:
            # Peers hold what this rank holds. What a collective fills comes before what it reads.
            sources = [tensor for tensor in inputs if _is_integer(tensor)]
            for tensor in [*sources[:-1], *integers] if sources else ():
                copies = _on_host(sources[-1]).flatten().repeat(1 + tensor.numel() // max(1, sources[-1].numel()))
                _write(tensor, copies[: tensor.numel()].view(tensor.shape))
        elif name in ROUTERS and integers and _are_scores(inputs[0], integers[0]):
            experts = inputs[0].shape[-1]
            self.dealt[experts] += 1
            _write(integers[0], torch.arange(integers[0].numel()).remainder_(experts).view(integers[0].shape))
        elif outputs and integers == outputs and not func.is_view and integers[0].numel() <= INTEGERS_MAX:
            try:
                values = func(*_on_host(args), **_on_host(options))
            except RuntimeError:
                # Some operations on integers, such as a histogram, exist on a GPU alone.
                values = func(*tree_map_only(Tensor, Tensor.double, _on_host(args)), **_on_host(options))
            _write(result, values)
        return result


class Decisions(_python_dispatch.TorchDispatchMode):
    """Find out whether integers or masks change what a program does: a shape, a route, or a choice of the host."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in MASKED:
            self.found |= any(i is not None and i.dtype == torch.bool for i in args[1])
        elif torch.Tag.data_dependent_output in func.tags:
            self.found |= _is_integer(args[0])
        else:
            self.found |= name in ROUTERS or torch.Tag.dynamic_output_shape in func.tags
        return func(*args, **(kwargs or {}))


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _are_scores(scores: Tensor, chosen: Tensor) -> bool:
    rows, experts = scores.shape[:-1], scores.shape[-1:].numel()
    return bool(rows) and not _is_integer(scores) and 1 < experts <= EXPERTS_MAX and chosen.shape[: len(rows)] == rows


def _on_device(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if type(leaf) in PLAIN and leaf.is_cuda]


def _on_host(value: Any) -> Any:
    """Return arguments with the processor as their device. Integers keep their memory there, and all else is zero."""

    def view(tensor: Tensor) -> Tensor:
        if not tensor.is_cuda or type(tensor) not in PLAIN:
            return tensor
        storage = tensor.untyped_storage()
        if not storage.nbytes() or not _is_integer(tensor):
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())

    return tree_map_only(torch.device, lambda device: torch.device("cpu"), tree_map_only(Tensor, view, value))


def _write(result: Any, values: Any) -> Any:
    """Put integers where a result is. Where an operation has changed its argument, they are there."""
    for tensor, value in zip(tree_leaves(result), tree_leaves(values), strict=True):
        is_held = isinstance(tensor, Tensor) and _is_integer(tensor)
        if is_held and (place := _on_host(tensor)).data_ptr() != value.data_ptr():
            place.copy_(value)
    return result
