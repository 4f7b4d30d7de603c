"""Muon: the matrices of blocks step along their orthogonalised momentum, everything else is AdamW's.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io/posts/muon), with the scale
of Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982). GPT-2's matrix for query, key and value is three here.

A matrix is orthogonalised as a whole. Of one that is cut over ranks, each rank sends its part of the momentum to the owner of the
matrix, who sends back parts of the result: (d-1)/d x 2 x bN/d bytes from each of d ranks for N elements, and each computes 1/d.
Gathering all on every rank would send (d-1)/d x bN, and compute everything d times. b is 2 on a GPU and 4 on a CPU, by DTYPES.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptscale.common.optim.compact_adamw import step_fp32
from gptscale.common.optim.fused import create_state, decay_groups
from gptscale.common.settings.optimizers import OPTIMIZERS
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.state import is_dtensor, local, shard_of

# Factors of x, x x' x and x x' x x' x, tuned by Jordan et al. for the largest slope at 0. Singular values end near 1, not at 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# Keeps a momentum of zeros at zero.
SMALLEST_NORM = 1e-7
# The iterations compute in these types. Rounding before sending changes no bit, because one process rounds too.
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
# An orthogonal (rows, columns) has entries of root mean square 1 / sqrt(max(rows, columns)). AdamW's updates have about 0.2. This
# makes the same of them, so that rate and decay of AdamW serve both (Liu et al., section 2.2).
RMS = 0.2

Box = tuple[slice, ...]


def fused(parameters: dict[str, nn.Parameter], config: RunConfig) -> torch.optim.Optimizer:
    """Return an optimizer that divides gradients by `grad_scale`, and changes nothing if `found_inf` is set."""
    gpt = config.gpt()
    weights = {p: gpt.weight(name) for name, p in parameters.items() if name.startswith("blocks.")}
    matrices = {p: weight.rows for p, weight in weights.items() if weight.is_matrix}
    others = decay_groups((p for p in parameters.values() if p not in matrices), config.weight_decay)
    groups = [{"params": list(matrices), "weight_decay": config.weight_decay}, *others]
    return Muon(groups, matrices, {"lr": config.peak_lr, "betas": (config.beta1, config.beta2)}, config.muon_momentum)


def orthogonalised(x: Tensor) -> Tensor:
    """Return (n, rows, columns) with all singular values near 1, by iterations of Newton and Schulz.

    An iteration takes 4 r^2 c + 2 r^3 operations, r being the smaller of rows and columns and c the other.
    """
    a, b, c = COEFFICIENTS
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def direction(momentum: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Return the update of a weight at rate 1, where `rows` (common/settings/shape.py) says which matrices it consists of."""
    heads, n, _ = rows or (1, 1, 0)
    # (heads, n, rows of a head, columns), where the matrices are brought side by side.
    stacked = momentum.unflatten(0, (heads, n, -1)).transpose(0, 1)
    update = orthogonalised(stacked.flatten(1, 2))
    scaled = update * (RMS * max(update.shape[1:]) ** 0.5)
    return scaled.view(stacked.shape).transpose(0, 1).flatten(0, 2)


class Ranks(NamedTuple):
    """The ranks that a matrix is cut over. axes: of its mesh, those that cut."""

    group: dist.ProcessGroup
    axes: tuple[int, ...]


class Muon(torch.optim.Optimizer):
    """Muon over local shards. The first group holds the matrices of blocks, all others are stepped by AdamW.

    matrices: their `rows`. grad_scale, found_inf: as in the fused AdamW of torch. The host waits for nothing.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: dict[nn.Parameter, tuple[int, ...]],
        defaults: Any,
        momentum: float,
    ) -> None:
        super().__init__(groups, {**defaults, "eps": 1e-8})
        self.matrices, self.momentum = matrices, momentum
        row = OPTIMIZERS["muon"]
        create_state(self, matrices, row.matrix_keys)
        for group in self.param_groups[1:]:
            create_state(self, group["params"], row.state_keys)
        self.rounds = list(rounds(list(matrices)))

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every parameter from its gradient, which must exist."""
        torch._foreach_add_([state["step"] for state in self.state.values()], 1 - self.found_inf)
        first, *others = self.param_groups
        for group in (group for group in others if group["params"]):
            tensors = [
                (local(p), local(p.grad), local(self.state[p]["exp_avg"]), local(self.state[p]["exp_avg_sq"]))
                for p in group["params"]
            ]
            steps = [self.state[p]["step"] for p in group["params"]]
            step_fp32(self, group, zip(*tensors, strict=True), steps)
        for ranks, matrices in self.rounds:
            momenta = [self._momentum(p) for p in matrices]
            if ranks is None:
                updates = [direction(m, self.matrices[p]) for p, m in zip(matrices, momenta, strict=True)]
            else:
                updates = self._by_owners(ranks, matrices, momenta)
            for p, update in zip(matrices, updates, strict=True):
                weight = local(p)
                change = first["lr"] * (update.to(weight) + first["weight_decay"] * weight)
                weight.sub_(torch.where(self.found_inf > 0, 0.0, change))

    def _momentum(self, p: nn.Parameter) -> Tensor:
        """Return the momentum behind this step's gradient, in Nesterov's form, as the iterations take it."""
        mean = local(self.state[p]["momentum"])
        grad = torch.where(self.found_inf > 0, mean, local(p.grad) / self.grad_scale)
        mean.lerp_(grad, 1 - self.momentum)
        device = torch.device(p.device_mesh.device_type) if is_dtensor(p) else p.device
        return grad.lerp_(mean, self.momentum).to(device, DTYPES[device.type])

    def _by_owners(self, ranks: Ranks, matrices: Sequence[nn.Parameter], momenta: list[Tensor]) -> list[Tensor]:
        """Send the parts of each matrix to its owner, the rank of its number, and return the parts of the updates."""
        group, size, rank = ranks.group, dist.get_world_size(ranks.group), dist.get_rank(ranks.group)
        out = [m.numel() for m in momenta] + [0] * (size - len(momenta))
        boxes: list[Box] = boxes_of(matrices[rank], ranks.axes) if rank < len(matrices) else []
        whole = momenta[0].new_empty(matrices[rank].shape if boxes else 0)
        into = [whole[box].numel() for box in boxes] or [0] * size
        sent = torch.cat([m.flatten() for m in momenta])
        parts = sent.new_empty(sum(into))
        dist.all_to_all_single(parts, sent, into, out, group=group)
        if boxes:
            for box, part in zip(boxes, parts.split(into), strict=True):
                whole[box] = part.view_as(whole[box])
            update = direction(whole, self.matrices[matrices[rank]])
            parts = torch.cat([update[box].flatten() for box in boxes])
        dist.all_to_all_single(sent, parts, out, into, group=group)
        return [part.view_as(m) for part, m in zip(sent.split(out), momenta, strict=False)]


def rounds(matrices: list[nn.Parameter]) -> Iterator[tuple[Ranks | None, list[nn.Parameter]]]:
    """Yield matrices that are orthogonalised at a time: as many as there are ranks that they are cut over, of like size."""
    groups: dict[Any, Ranks] = {}
    cut: dict[Any, list[nn.Parameter]] = {}
    for p in sorted(matrices, key=lambda p: -p.numel()):
        axes = axes_of(p)
        key = (p.device_mesh, axes) if is_dtensor(p) and axes else None
        if key and key not in groups:
            groups[key] = Ranks(group_of(*key), axes)
        cut.setdefault(key, []).append(p)
    for key, those in cut.items():
        size = dist.get_world_size(groups[key].group) if key else 1
        yield from ((groups.get(key), those[i : i + size]) for i in range(0, len(those), size))


def axes_of(p: Tensor) -> tuple[int, ...]:
    """Return the axes of a DTensor's mesh that cut it."""
    if not is_dtensor(p):
        return ()
    return tuple(i for i, placed in enumerate(p.placements) if p.device_mesh.size(i) > 1 and not placed.is_replicate())


def group_of(mesh: Any, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of this process along axes of a mesh. Every process of it must call this."""
    if len(axes) > 1:
        mesh, axes = mesh[tuple(mesh.mesh_dim_names[i] for i in axes)]._flatten(), (0,)
    group: dist.ProcessGroup = mesh.get_group(axes[0])
    return group


def boxes_of(p: Any, axes: tuple[int, ...]) -> list[Box]:
    """Return the box of each rank along `axes`. The last axis cuts first, as tensor parallelism does before fully_shard."""
    boxes = []
    for place in itertools.product(*(range(p.device_mesh.size(axis)) for axis in axes)):
        box = [slice(0, n) for n in p.shape]
        for axis, i in reversed([*zip(axes, place, strict=True)]):
            dim, ranks = p.placements[axis].dim, p.device_mesh.size(axis)
            begin, end = box[dim].start, box[dim].stop
            part = -(-(end - begin) // ranks)
            box[dim] = slice(min(begin + i * part, end), min(begin + (i + 1) * part, end))
        boxes.append(tuple(box))
    assert shard_of("", p).box in boxes, f"DTensor cuts {p.placements} in another order"
    return boxes
