"""Balanced routes of experts, for --balanced-experts: tokens are dealt in turn, and what follows from that is computed.

Under the mock each score is zero and no kernel runs, so a router's choice means nothing. Here the indices of a topk, a sort or a
maximum over experts are dealt in turn, and operations on these alone are computed on the processor: counts, masks and orders of
tokens become those of a balanced step. The memory of the mock's device is address space of this process.

The program reads a copy of this file (on_path.py) in an environment without gptscale. So it imports torch alone.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

# More experts than a model has, and fewer than words: the most likely word of a vocabulary is no route.
EXPERTS_MAX = 1024
ROUTERS = ("topk", "argmax", "max", "sort")
# The values that these make depend on no others. Gradients and weights are larger, or wider than there are experts.
FILLS = ("zeros", "ones", "full", "arange", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
FILL_MAX = 2**22
DYNAMIC = torch.Tag.dynamic_output_shape


class BalancedExperts(_python_dispatch.TorchDispatchMode):
    """It deals tokens to experts. dealt: how often, for each number of experts."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.dealt: Counter[int] = Counter()
        # Storages on the device whose values are there.
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **options)
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        name = func._schema.name.partition("::")[2]
        tensors = [value for value in tree_leaves((args, options)) if isinstance(value, Tensor)]
        known = [tensor for tensor in tensors if self._knows(tensor)]
        is_collective = "c10d" in func.namespace
        if known and not is_collective and len(known) == sum(tensor.is_cuda for tensor in tensors):
            return self._compute(func, args, options)
        if known and DYNAMIC in func.tags:
            func, args = self._without_masks(func, name, args)
        result = func(*args, **options)
        if known and is_collective:
            # Peers hold what this rank holds.
            for tensor in (tensor for tensor in tree_leaves([result, tensors]) if isinstance(tensor, Tensor)):
                if tensor.is_cuda and not self._knows(tensor):
                    one = _on_host(known[0]).flatten()
                    self._write(tensor, one.repeat(-(-tensor.numel() // len(one)))[: tensor.numel()].view(tensor.shape))
            return result
        if name in ROUTERS and _is_over_experts(func, args, options):
            self._deal(result, args[0].shape[-1])
        elif name in FILLS and _is_small(result):
            self._write(result, func(*_on_host(args), **_on_host(options)))
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self._known.pop(value.untyped_storage()._cdata, None)
        return result

    def _knows(self, tensor: Tensor) -> bool:
        reference = self._known.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    def _write(self, result: Any, values: Any) -> None:
        """Put values where a result is, and know them from now on."""
        for tensor, value in zip(tree_leaves(result), tree_leaves(values), strict=True):
            if isinstance(tensor, Tensor):
                _on_host(tensor).copy_(value)
                storage = tensor.untyped_storage()
                if tensor.is_cuda:
                    self._known[storage._cdata] = StorageWeakRef(storage)

    def _deal(self, result: Any, experts: int) -> None:
        indices = next(tensor for tensor in tree_leaves(result) if not tensor.is_floating_point())
        self.dealt[experts] += 1
        self._write(indices, torch.arange(indices.numel()).remainder_(experts).view(indices.shape))

    def _compute(self, func: Any, args: Any, options: Any) -> Any:
        """Do an operation whose values are known on the device, for its memory, and on the processor, for its values."""
        host_args, host_options = _on_host(args), _on_host(options)
        result = None if DYNAMIC in func.tags else func(*args, **options)
        if func.is_view:
            return result
        try:
            values = func(*host_args, **host_options)
        except RuntimeError:
            # Some operations on integers, such as a histogram, exist on a GPU alone.
            values = func(*tree_map_only(Tensor, Tensor.double, host_args), **host_options)
        if result is None:
            device = next(value.device for value in tree_leaves(args) if isinstance(value, Tensor) and value.is_cuda)
            result = tree_map_only(Tensor, lambda value: torch.empty_like(value, device=device), values)
        if all(each.alias_info is None for each in func._schema.returns):
            self._write(result, values)
        return result

    def _without_masks(self, func: Any, name: str, args: Any) -> tuple[Any, Any]:
        """Return a selection by known masks as one by the numbers of what they select, which the device can do by itself."""
        if name == "masked_select":
            values, mask = torch.broadcast_tensors(*args)
            func, name, args = torch.ops.aten.index.Tensor, "index", (values, [mask])
        if name != "index":
            return func, args
        indices: list[Any] = []
        for index in args[1]:
            is_mask = index is not None and index.dtype == torch.bool and self._knows(index)
            indices += [each.to(index.device) for each in _on_host(index).nonzero(as_tuple=True)] if is_mask else [index]
        return func, (args[0], indices)


def _on_host(value: Any) -> Any:
    """Return a view of a tensor's memory for the processor, or arguments with all their tensors and devices so."""

    def view(tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())

    on_host = tree_map_only(Tensor, view, value)
    return tree_map_only(torch.device, lambda device: torch.device("cpu"), on_host)


def _is_over_experts(func: Any, args: Any, options: Any) -> bool:
    """Return whether an operation chooses along the last axis of scores on the device, one for each expert."""
    axis = {a.name: a.default_value for a in func._schema.arguments}
    axis |= dict(zip(axis, args, strict=False)) | options
    scores = args[0]
    return (
        scores.is_cuda
        and scores.is_floating_point()
        and scores.dim() > 1
        and 1 < scores.shape[-1] <= EXPERTS_MAX
        and axis.get("dim") in (-1, scores.dim() - 1)
    )


def _is_small(tensor: Tensor) -> bool:
    narrow = not tensor.is_floating_point() or (tensor.dim() > 1 and tensor.shape[-1] <= EXPERTS_MAX)
    return tensor.is_cuda and tensor.numel() <= FILL_MAX and narrow
