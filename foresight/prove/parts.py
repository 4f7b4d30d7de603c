"""Which part of a whole weight a rank holds, whatever its library: DDP, FSDP 1 and 2, DTensor, ZeRO 1 to 3, or plain code.

A program of somebody else reads a copy of this file (foresight/mock_cuda/on_path.py) in an environment without gptscale. So it
imports torch alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

# Words that libraries put into names: their wrappers, torch.compile, recomputation.
WRAPPERS = re.compile(
    r"\b(module|_fsdp_wrapped_module|_orig_mod|_forward_module|_original_module|_checkpoint_wrapped_module)\."
)


@dataclass(frozen=True)
class Part:
    """A part of the whole weight `name`, as it lies in a tensor of this rank.

    size: of the whole. where: {"box": [[start, length] for each dimension]}, or {"flat": [start, length]} of the flattened whole,
    or {"rows": [dimension, indices]}. start, numel: of the flattened local tensor, numel None for all of it.
    """

    name: str
    size: list[int]
    where: dict[str, Any]
    start: int = 0
    numel: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of a local tensor (a weight, its gradient or a moment), as a view of it."""
        own = local(tensor)
        return own if self.numel is None else own.view(-1)[self.start : self.start + self.numel]

    def cut(self, whole: Tensor) -> Tensor:
        if "flat" in self.where:
            start, length = self.where["flat"]
            return whole.reshape(-1)[start : start + length]
        if "rows" in self.where:
            dimension, rows = self.where["rows"]
            return whole.index_select(dimension, torch.tensor(rows))
        return whole[tuple(slice(start, start + length) for start, length in self.where["box"])]


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.data


def part_of(name: str, tensor: Any) -> Part:
    """Return what a tensor holds: all, or the part of a DTensor, whose sizes along each axis of its mesh are torch.chunk's."""
    box = [[0, length] for length in tensor.shape]
    if not hasattr(tensor, "device_mesh"):
        return Part(name, list(tensor.shape), {"box": box})
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    # FSDP over tensor ranks: the split that is written first was made last.
    axes = sorted(range(mesh.ndim), key=lambda axis: getattr(tensor.placements[axis], "split_factor", 1) > 1)
    for axis in axes:
        dimension = getattr(tensor.placements[axis], "dim", None)
        if dimension is not None:
            start, length = box[dimension]
            size = -(-length // mesh.size(axis))
            before = min(length, coordinate[axis] * size)
            box[dimension] = [start + before, min(size, length - before)]
    return Part(name, list(tensor.shape), {"box": box})


def clean(name: str) -> str:
    """Return a weight's name without what libraries have put into it."""
    return WRAPPERS.sub("", name)


def weights_of(root: nn.Module) -> Iterator[tuple[Tensor, Part]]:
    """Yield each tensor that holds a weight of a model, or a part of it, or several: then once for each."""
    flat = set[int]()
    for path, module in root.named_modules():
        handle: Any = getattr(module, "_handle", None)
        if hasattr(handle, "flat_param"):
            # Those that lie in other ranks' shards are empty here.
            flat |= {id(parameter) for parameter in (handle.flat_param, *(handle.flat_param._params or ()))}
            yield from _fsdp1(f"{path}." if path else "", handle.flat_param)
        if type(module).__module__.startswith("fairscale.nn.data_parallel.fully"):
            for parameter in module.params:
                flat.add(id(parameter))
                yield from _fairscale(f"{path}." if path else "", parameter, module.process_group)
    for path, parameter in root.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "ds_tensor"):
            yield from _zero3(clean(path), parameter)
        elif id(parameter) not in flat:
            yield parameter, part_of(clean(path), parameter)
    yield from _zero(root)


def _fsdp1(path: str, flat: Any) -> Iterator[tuple[Tensor, Part]]:
    """Yield the parts of a flat parameter of FSDP 1, which its original parameters hold if they are kept, or itself."""
    own = flat._params or [None] * len(flat._fqns)
    for name, size, info, parameter in zip(flat._fqns, flat._shapes, flat._shard_param_infos, own, strict=True):
        if info.in_shard:
            part = Part(clean(path + name), list(size), {"flat": [info.intra_param_start_idx, info.numel_in_shard]})
            start, numel = info.offset_in_shard, info.numel_in_shard
            yield (flat, replace(part, start=start, numel=numel)) if parameter is None else (parameter, part)


def _fairscale(path: str, flat: Any, group: Any) -> Iterator[tuple[Tensor, Part]]:
    """Yield the parts of a flat parameter of fairscale, of which each rank has as many elements, the last some filling."""
    start, begin = 0, group.rank() * flat.numel()
    for name, size, numel in zip(*flat.metadata(), strict=True):
        low, high = max(start, begin), min(start + numel, begin + flat.numel())
        if low < high:
            where = {"flat": [low - start, high - low]}
            yield flat, Part(clean(path + name), list(size), where, low - begin, high - low)
        start += numel


def _zero3(name: str, parameter: Any) -> Iterator[tuple[Tensor, Part]]:
    """Yield this rank's partition of a weight under ZeRO 3, whose end may be filling."""
    length = parameter.ds_tensor.numel()
    start = torch.distributed.get_rank(parameter.ds_process_group) * length
    kept = max(0, min(length, parameter.ds_numel - start))
    yield parameter.ds_tensor, Part(name, list(parameter.ds_shape), {"flat": [start, kept]}, 0, kept)


def _zero(root: nn.Module) -> Iterator[tuple[Tensor, Part]]:
    """Yield what DeepSpeed's optimizer holds beside the weights: flat partitions in full precision."""
    optimizer: Any = getattr(root, "optimizer", None)
    places = getattr(optimizer, "grad_position", {})
    for path, parameter in root.named_parameters() if type(root).__name__ == "DeepSpeedEngine" else ():
        name, fragment = clean(path), getattr(parameter, "_hp_mapping", None)
        if hasattr(parameter, "ds_tensor") and (number := optimizer.get_param_id(parameter)) in places:
            ((_, part),) = _zero3(name, parameter)
            yield optimizer.fp32_partitioned_groups_flat[places[number][0]], replace(part, start=places[number][1])
        elif fragment is not None:
            at, mine = fragment.lp_fragment_address, fragment.hp_fragment_address
            flat = {p.data_ptr(): p for p in optimizer.single_partition_of_fp32_groups}
            holder = flat[fragment.hp_fragment.data_ptr() - mine.start * fragment.hp_fragment.element_size()]
            yield holder, Part(name, list(parameter.shape), {"flat": [at.start, at.numel]}, mine.start, mine.numel)


def found_in(part: Part, own: Tensor, full: Tensor) -> Part | None:
    """Return the part of a whole of another size that a rank of plain code holds, or None.

    Each row is looked up by its values. Where none has a like, equal parts in the order of the ranks are taken.
    """
    if own.dim() != full.dim() or not own.numel():
        return None
    unlike = [d for d in range(own.dim()) if own.shape[d] != full.shape[d]]
    if len(unlike) != 1 or full.shape[unlike[0]] % own.shape[unlike[0]]:
        return None
    dimension, length = unlike[0], own.shape[unlike[0]]
    values = [x.movedim(dimension, 0).reshape(x.shape[dimension], -1).tolist() for x in (full, own.to(full.dtype))]
    rows = {tuple(row): number for number, row in enumerate(values[0])}
    found = [rows.get(tuple(row), -1) for row in values[1]]
    if -1 in found or len({*found}) < length or len(rows) < full.shape[dimension]:
        ranks = full.shape[dimension] // length
        rank = torch.distributed.get_rank() % ranks if torch.distributed.is_initialized() else 0
        found = list(range(rank * length, (rank + 1) * length))
    return replace(part, size=list(full.shape), where={"rows": [dimension, found]})
