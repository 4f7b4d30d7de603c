"""What a simulation tells: a table of the memory by owner, `simulation.json`, and a picture of the memory over a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gptscale.common.measure.gpus import GIB
from gptscale.foresight.memory.constants import Constant
from gptscale.foresight.memory.timeline import ACTIVATION, OTHER, Timeline, kind_of
from gptscale.results.render import subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A curve needs no more points than a picture has columns.
POINTS = 2000
COLOURS = {
    "parameter": "#4c72b0", "optimizer state": "#8172b3", "gradient": "#c44e52", "gathered shard": "#64b5cd",
    "bucket": "#937860", "activation": "#55a868", "logits and loss": "#ccb974", "under way in backward": "#da8bc3",
    "under way in the optimizer": "#8c8c8c", "while the engine is built": "#d8d8b0", "workspace": "#e8c39e",
    "other": "#bbbbbb",
}  # fmt: skip


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank, in bytes.

    allocated, reserved: the peaks of torch's allocator. capacity: of the device. pinned: host memory pinned for the device. host:
    all that the rank needs there. host_capacity: its share of the machine's, None if that is not known. constants: what lies
    beside the allocator. out_of_memory: the allocator's message, if the memory ended.
    """

    rank: int
    timeline: Timeline
    allocated: int
    reserved: int
    capacity: int
    pinned: int = 0
    host: int = 0
    host_capacity: int | None = None
    constants: Sequence[Constant] = ()
    out_of_memory: str = ""

    @property
    def needed(self) -> int:
        """Return what the device must hold: what torch reserves, and the constants."""
        return self.reserved + sum(constant.nbytes for constant in self.constants)

    @property
    def fits_host(self) -> bool:
        return self.host_capacity is None or self.host <= self.host_capacity

    @property
    def fits(self) -> bool:
        return self.fits_host and not self.out_of_memory and self.needed <= self.capacity

    @property
    def fits_barely(self) -> bool:
        """Return whether the device holds what is allocated, but not what torch keeps unused."""
        squeezed = self.allocated + self.needed - self.reserved <= self.capacity < self.needed
        return squeezed and not self.out_of_memory and self.fits_host

    @property
    def is_too_large(self) -> bool:
        return not (self.fits or self.fits_barely)

    def at_peak(self) -> dict[str, int]:
        """Return the bytes at the peak by owner, the activations of all modules in one, the largest first."""
        kinds = Counter[str]()
        for owner, nbytes in self.timeline.by_owner(self.timeline.peak_at).items():
            kinds[kind_of(owner)] += nbytes
        return dict(kinds.most_common())

    def rounding(self) -> int:
        """Return what the allocator's blocks hold at the peak beyond what was asked for."""
        return max(0, self.allocated - self.timeline.peak)

    def as_json(self) -> dict[str, Any]:
        timeline = self.timeline
        return {
            "rank": self.rank,
            "peak_allocated_bytes": self.allocated,
            "peak_reserved_bytes": self.reserved,
            "peak_part": timeline.part_at(timeline.peak_at),
            "peak_by_owner_bytes": {**timeline.by_owner(timeline.peak_at), "rounding of blocks": self.rounding()},
            "fragmentation": 1 - self.allocated / self.reserved if self.reserved else 0.0,
            "capacity_bytes": self.capacity,
            "outside_of_torch_bytes": {constant.name: constant.nbytes for constant in self.constants},
            "needed_bytes": self.needed,
            "fits": self.fits,
            "out_of_memory": self.out_of_memory or None,
            "pinned_bytes": self.pinned,
            "host_bytes": self.host,
            "host_capacity_bytes": self.host_capacity,
        }


def filled_by(memory: RankMemory) -> str:
    """Return what fills the peak, in a few words: the largest owners with their GiB."""
    owners = memory.at_peak()
    words = [f"{owner}{'s' if owner == ACTIVATION else ''} {nbytes / GIB:.1f} GiB" for owner, nbytes in owners.items()]
    return ", ".join(words[:3])


def draw(ranks: Sequence[RankMemory], title: str) -> Figure:
    """Draw the memory over the last step by owner, of each rank beside the others, on one scale."""
    figure, axes = subplots(1, len(ranks), (4.5 + 4.0 * len(ranks), 4.4), sharey=True)
    figure.suptitle(title, fontsize=10, x=0.01, horizontalalignment="left")
    drawn = {kind for rank in ranks for kind in _curves(rank)}
    kinds = [kind for kind in COLOURS if kind in drawn]
    for axis, rank in zip(axes[0], ranks, strict=True):
        stack(axis, rank, kinds)
    axes[0][0].set_ylabel("GiB")
    handles, labels = axes[0][-1].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8, frameon=False)
    return figure


def stack(axis: Any, rank: RankMemory, kinds: Sequence[str]) -> None:
    """Draw the memory of a rank over its last step on one axis. kinds: owners to draw, from the bottom up."""
    curves = _curves(rank)
    length = max((len(curve) for curve in curves.values()), default=0)
    stacked = [curves.get(kind, np.zeros(length)) / GIB for kind in kinds]
    axis.stackplot(np.arange(length), *stacked, colors=[COLOURS[kind] for kind in kinds], labels=kinds, linewidth=0)
    axis.axhline(rank.reserved / GIB, color="black", linestyle="--", linewidth=0.8, label="reserved at most")
    # A device that is nearly empty would press the curves flat.
    if rank.reserved > 0.4 * rank.capacity:
        axis.axhline(rank.capacity / GIB, color="red", linewidth=0.8, label="the device")
    axis.set_title(f"rank {rank.rank}: peak {rank.allocated / GIB:.2f} GiB", fontsize=9)
    axis.set_xlabel("allocations and releases of one step, in turn", fontsize=8)
    axis.set_xticks([])
    axis.margins(x=0)


def _curves(rank: RankMemory) -> dict[str, np.ndarray]:
    """Return the curves of the last step, thinned so that each point is the one of the highest total around it."""
    timeline = rank.timeline
    begin = timeline.steps[-1] if timeline.steps else 0
    curves = {kind if kind in COLOURS else OTHER: of for kind, of in timeline.curves(begin).items()}
    total = timeline.total[begin : timeline.times]
    every = max(1, len(total) // POINTS)
    chosen = [i + int(np.argmax(total[i : i + every])) for i in range(0, len(total), every)]
    return {kind: curve[chosen] for kind, curve in curves.items()}
