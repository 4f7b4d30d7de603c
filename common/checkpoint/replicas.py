"""Check that ranks with copies of the same weights and optimizer state still hold the same bits.

Replicas begin equal and apply equal updates, so they stay equal bit for bit. A bit that a memory or a processor flips on one of
them stays flipped, spoils every later step of the run, and shows in no loss for a long time.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gptscale.common.engine import Engine
from gptscale.common.errors import ConfigError, NumericError
from gptscale.common.process.world import gather_objects
from gptscale.common.state import Box, box_of, holders

# Elements at once: the products of so many stay in a processor's cache, which makes the hash ten times as fast.
PIECE = 2**16
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_hash(tensor: Tensor) -> Tensor:
    """Return a hash of the bits of a tensor, an int64 on its device, which any single flipped bit changes.

    It is the sum modulo 2^64 of the elements, read as integers, each times an odd number of its own. A flipped bit b changes an
    element by 2^b, and 2^b times an odd number is never a multiple of 2^64.
    """
    flat = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
    factors = _odd_numbers(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for index, piece in enumerate(flat.split(PIECE)):
        total += (piece * factors[: piece.numel()]).sum() * (2 * index + 1)
    return total


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    """Return PIECE odd numbers, the same on every rank. They are drawn from a generator of their own, which moves no other."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (PIECE,), generator=generator) * 2 + 1).to(device)


class ReplicaCheck:
    """The comparison of all boxes of an engine's state that more than one rank holds."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._holders: dict[Box, list[int]] | None = None
        self._equal_at: int | None = None

    def require_replicas(self) -> None:
        """Raise ConfigError, on every rank, if no two ranks hold the same part of what a checkpoint has."""
        if not self._find_holders():
            what = "no two ranks hold the same part of what a checkpoint has, so that there are no bits to compare"
            raise ConfigError(what, "in --check-replicas", "leave it out, or use a recipe with copies, such as ddp")

    def __call__(self, step: int) -> None:
        """Compare now, in a call that every rank must make. All raise NumericError if replicas differ."""
        if self._holders is None:
            self._holders = self._find_holders()
        if not self._holders:
            return
        numbers = {box: number for number, box in enumerate(self._holders)}
        own = {numbers[box]: bits_hash(s.tensor) for s in self.engine.state() if (box := box_of(s)) in numbers}
        device = next(iter(own.values())).device if own else torch.device("cpu")
        # One copy to the host for all of them.
        values = torch.stack([h.to(device) for h in own.values()]).tolist() if own else []
        of_ranks: list[dict[int, int]] = gather_objects(dict(zip(own, values, strict=True)))
        different = {}
        for box, ranks in self._holders.items():
            if odd := odd_ones({rank: of_ranks[rank][numbers[box]] for rank in ranks}):
                different[box] = odd
        if different:
            raise self._error(step, different)
        self._equal_at = step

    def _find_holders(self) -> dict[Box, list[int]]:
        boxes_of_ranks = gather_objects([box_of(s) for s in self.engine.state() if s.tensor.numel()])
        return {box: ranks for box, ranks in holders(boxes_of_ranks).items() if len(ranks) > 1}

    def _error(self, step: int, different: dict[Box, list[int]]) -> NumericError:
        assert self._holders is not None
        box, odd = next(iter(different.items()))
        others = [rank for rank in self._holders[box] if rank not in odd]
        more = f" (and {len(different) - 1} more tensors)" if len(different) > 1 else ""
        if others:
            what = f"{_ranks(odd)} does not hold the bits of {box[0]} that {_ranks(others)} agree on{more}"
        else:
            what = f"{_ranks(odd)} hold different bits of {box[0]}{more}, and no majority says which is right"
        where = f"at step {step}" + (f" (equal at step {self._equal_at})" if self._equal_at is not None else "")
        fix = "go on with --resume auto; if it happens to the same rank again, test its memory"
        return NumericError(what, where, fix)


def odd_ones(hashes: dict[int, int]) -> list[int]:
    """Return the ranks whose hash differs from the majority's, or all ranks if there is no majority."""
    values = list(hashes.values())
    common = max(values, key=values.count)
    if values.count(common) * 2 <= len(values):
        return list(hashes)
    return [rank for rank, value in hashes.items() if value != common]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
