"""Muon: the matrices of blocks step along their orthogonalised momentum, everything else is AdamW's.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io/posts/muon), with the scale
of Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982). GPT-2's matrix for query, key and value is three here.

A matrix is orthogonalised as a whole. Of one that is cut over d ranks, each rank sends its part of the momentum to the matrix's
owner, who sends back parts of the result. For N elements of b bytes a rank sends 2 (d-1)/d x bN/d bytes and computes 1/d of all.
If all ranks gathered all matrices, each would send (d-1)/d x bN and compute everything (docs/measurements/muon.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptscale.common.optim.compact_adamw import step_fp32
from gptscale.common.optim.fused import create_state, decay_groups
from gptscale.common.settings.optimizers import ADAMW_STATE
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
    defaults = {"lr": config.peak_lr, "betas": (config.beta1, config.beta2), "eps": 1e-8}
    return Muon(groups, defaults, matrices, config.muon_momentum)


def orthogonalised(x: Tensor) -> Tensor:
    """Return (n, rows, columns) with all singular values near 1, by iterations of Newton and Schulz.

    An iteration takes 4 r^2 c + 2 r^3 operations, where r is the smaller of rows and columns and c the other.
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
    # (n, heads, rows of a head, columns), where the rows of each matrix are side by side.
    stacked = momentum.unflatten(0, (heads, n, -1)).transpose(0, 1)
    update = orthogonalised(stacked.flatten(1, 2))
    scaled: Tensor = update * (RMS * max(update.shape[1:]) ** 0.5)
    return scaled.view(stacked.shape).transpose(0, 1).flatten(0, 2)


class Round(NamedTuple):
    """Matrices that are orthogonalised at a time: one, or as many as there are ranks in `group`, each of which owns one.

    boxes: which part of this rank's own each rank holds.
    """

    matrices: list[nn.Parameter]
    group: dist.ProcessGroup | None = None
    boxes: list[Box] = []  # noqa: RUF012  (a NamedTuple default; never written to)


class Muon(torch.optim.Optimizer):
    """Muon over local shards. The first group holds the matrices of blocks, all others are stepped by AdamW.

    rows: of each matrix, as `direction` takes it. grad_scale, found_inf: as in torch's fused AdamW. The host waits for nothing.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self, groups: list[dict[str, Any]], defaults: dict[str, Any], rows: dict[nn.Parameter, Any], momentum: float
    ) -> None:
        super().__init__(groups, defaults)
        self.rows, self.momentum, self.rounds = rows, momentum, list(rounds(list(rows)))
        create_state(self, rows, ("momentum",))
        create_state(self, (p for group in self.param_groups[1:] for p in group["params"]), ADAMW_STATE)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every parameter from its gradient, which must exist."""
        torch._foreach_add_([state["step"] for state in self.state.values()], 1 - self.found_inf)
        first, *others = self.param_groups
        for group in (group for group in others if group["params"]):
            params = group["params"]
            columns = [[local(p) for p in params], [local(p.grad) for p in params]]
            columns += [[local(self.state[p][key]) for p in params] for key in ADAMW_STATE]
            step_fp32(self, group, columns, [self.state[p]["step"] for p in params])
        for turn in self.rounds:
            updates = self._updates(turn, [self._momentum(p) for p in turn.matrices])
            for p, update in zip(turn.matrices, updates, strict=True):
                weight = local(p)
                change = first["lr"] * (update.to(weight) + first["weight_decay"] * weight)
                weight.sub_(torch.where(self.found_inf > 0, 0.0, change))

    def _momentum(self, p: Any) -> Tensor:
        """Add this step's gradient to the momentum, and return Nesterov's form of it in the type of the iterations."""
        mean = local(self.state[p]["momentum"])
        grad = torch.where(self.found_inf > 0, mean, local(p.grad) / self.grad_scale)
        mean.lerp_(grad, 1 - self.momentum)
        device = torch.device(p.device_mesh.device_type) if is_dtensor(p) else p.device
        return grad.lerp_(mean, self.momentum).to(device, DTYPES[device.type])

    def _updates(self, turn: Round, momenta: list[Tensor]) -> list[Tensor]:
        """Send the parts of each matrix to its owner, the rank of its number, and return the parts of the updates."""
        if turn.group is None:
            return [direction(momenta[0], self.rows[turn.matrices[0]])]
        size, rank, sent = dist.get_world_size(turn.group), dist.get_rank(turn.group), [m.numel() for m in momenta]
        flat, out = torch.cat([m.flatten() for m in momenta]), sent + [0] * (size - len(sent))
        own = turn.matrices[rank] if turn.boxes else None
        whole = flat.new_empty(() if own is None else own.shape)
        into = [whole[box].numel() for box in turn.boxes] or [0] * size
        parts = flat.new_empty(sum(into))
        dist.all_to_all_single(parts, flat, into, out, group=turn.group)
        if own is not None:
            for box, part in zip(turn.boxes, parts.split(into), strict=True):
                whole[box] = part.view_as(whole[box])
            update = direction(whole, self.rows[own])
            parts = torch.cat([update[box].flatten() for box in turn.boxes])
        dist.all_to_all_single(flat, parts, out, into, group=turn.group)
        return [part.view_as(m) for part, m in zip(flat.split(sent), momenta, strict=True)]


def rounds(matrices: list[nn.Parameter]) -> Iterator[Round]:
    """Yield the rounds of a step. Matrices of one round are about as large. Every rank of a mesh must call this."""
    p: Any
    cut: dict[Any, list[nn.Parameter]] = {}
    for p in sorted(matrices, key=lambda p: -p.numel()):
        placed = enumerate(p.placements) if is_dtensor(p) else ()
        axes = tuple(i for i, place in placed if p.device_mesh.size(i) > 1 and not place.is_replicate())
        if axes:
            cut.setdefault((p.device_mesh, axes), []).append(p)
        else:
            yield Round([p])
    for (mesh, axes), those in cut.items():
        part = mesh[tuple(mesh.mesh_dim_names[i] for i in axes)]
        group = (part._flatten() if len(axes) > 1 else part).get_group()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        for own in (those[i : i + size] for i in range(0, len(those), size)):
            yield Round(own, group, boxes_of(own[rank], axes) if rank < len(own) else [])


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
