"""The bytes of weights, gradients and optimizer state that one rank holds, exactly, from the shapes alone.

Every recipe cuts the same list of parameters over data ranks in a way of its own, after stages and tensor ranks did. State is
counted as in Rajbhandari et al. 2020 (arXiv 1910.02054, section 3), and then what a library pads and what it counts steps with.
This module imports nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from gptscale.common.engines.rank_shapes import all_shapes, numel
from gptscale.common.settings.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from gptscale.common.recipe_config import RecipeConfig
    from gptscale.common.settings.run import Run

# of common/optim/compact_adamw.py and blockwise.py, which import torch; a test holds them together
SMALL, BLOCK = 4096, 256
# A rank's flat vector begins at a multiple of this many elements in DeepSpeed.
ZERO_ALIGNMENT = 2


class State(NamedTuple):
    """Bytes of one rank's weights that are computed with, of its gradients at the step, and of its optimizer's state.

    The state has the fp32 weights where those that are computed with are others.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(self)


def n_moments(run: Run) -> int:
    """Return how many tensors the optimizer keeps for each parameter."""
    return len(OPTIMIZERS[run.config.optimizer].state_keys)


def moments(run: Run, numels: Iterable[int]) -> int:
    """Return the bytes of the optimizer's state of tensors of so many elements, as common/optim keeps it."""
    sizes, form, kept = list(numels), run.config.optimizer_state, n_moments(run)
    if form == "fp32":
        # Each has a count of steps.
        return sum(4 * kept * n + 4 for n in sizes) if kept else 0
    packed = [n - n % BLOCK if n >= SMALL else 0 for n in sizes]
    each = {"bf16": 2 * BLOCK, "8bit": BLOCK + 4}[form]
    blocks = sum(2 * each * (n // BLOCK) for n in packed)
    return 4 + blocks + sum(8 * (n - p) for n, p in zip(sizes, packed, strict=True))


def whole(run: Run, config: RecipeConfig) -> State:
    """Return the state of a rank that holds all of what tensor ranks and stages leave it."""
    numels = [math.prod(shape) for shape in all_shapes(run, config)]
    return State(4 * sum(numels), 4 * sum(numels), moments(run, numels))


def cut_by_rows(run: Run, config: RecipeConfig, shards: int, shard: int) -> State:
    """Return the state of a rank under `fully_shard`: the rows of each parameter, padded to equal shards in what is sent."""
    padded, own = [], []
    for shape in all_shapes(run, config):
        rows = -(-shape[0] // shards)
        row = math.prod(shape[1:])
        padded.append(rows * row)
        own.append(max(0, min(rows, shape[0] - shard * rows)) * row)
    return State(4 * sum(padded), 4 * sum(padded), moments(run, own))


def cut_flat(run: Run, config: RecipeConfig, shards: int, compute: int) -> State:
    """Return the state of a rank under DeepSpeed's stages 1 and 2: two flat vectors, of matrices and of the rest, cut evenly."""
    shapes = all_shapes(run, config)
    groups = [numel(s for s in shapes if (len(s) > 1) == matrices) for matrices in (True, False)]
    unit = ZERO_ALIGNMENT * shards
    flat = [-(-n // unit) * unit for n in groups]
    own = [n // shards for n in flat]
    return State(compute * sum(flat), 4 * sum(own), 4 * sum(own) + moments(run, own))


def owned(run: Run, config: RecipeConfig, ranks: int) -> list[list[int]]:
    """Return the elements of each rank's own parameters under fairscale's OSS: each goes to the rank that has least so far."""
    shapes = all_shapes(run, config)
    sizes: list[int] = [0] * ranks
    own: list[list[int]] = [[] for _ in range(ranks)]
    for matrices in (True, False):
        for n in (math.prod(s) for s in shapes if (len(s) > 1) == matrices):
            owner = sizes.index(min(sizes))
            sizes[owner] += n
            own[owner].append(n)
    return own


def kept_gradients(owned_sizes: list[list[int]], rank: int, room: int) -> int:
    """Return the elements of gradients that a rank keeps under fairscale's ShardedDataParallel.

    They are its own, and of each other owner those that share a bucket with room for less than `room`, smallest first. A gradient
    that finds no room goes when it was sent (sharded_ddp.py, _setup_bucket_strategy).
    """
    n_kept = 0
    for owner, sizes in enumerate(owned_sizes):
        fill = 0
        for size in sorted(sizes):
            fill += size if fill + size < room else 0
        n_kept += sum(sizes) if owner == rank else fill
    return n_kept


def cut_by_owners(run: Run, config: RecipeConfig, rank: int, ranks: int) -> State:
    """Return the state of a rank under fairscale's OSS."""
    n = numel(all_shapes(run, config))
    return State(4 * n, 4 * n, moments(run, owned(run, config, ranks)[rank]))
