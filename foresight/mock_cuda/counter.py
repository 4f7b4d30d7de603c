"""The log of torch's own CUDA allocator, read as foresight/memory reads the log of a CPU's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# More than any simulation makes: 48 layers allocate some 3,000 blocks a step.
ENTRIES_MAX = 20_000_000


class CudaCounter:
    """The allocations of one device since `counting` began, from whatever thread and stream.

    Its time is the number of events so far: each is a block taken from the allocator or given back to it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._owners: list[tuple[int, int]] = [(0, 0)]
        self._entries: list[dict[str, Any]] = []
        self._before = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Log every allocation while the body runs."""
        self._before = self._events()
        torch.cuda.memory._record_memory_history(
            enabled="all", context=None, stacks="python", max_entries=ENTRIES_MAX, device=self.device
        )
        try:
            yield
        finally:
            traces = torch.cuda.memory._snapshot(self.device)["device_traces"]
            self._entries = traces[self.device.index or 0]
            torch.cuda.memory._record_memory_history(enabled=None, device=self.device)

    def _events(self) -> int:
        torch.cuda.init()
        blocks = torch._C._cuda_memoryStats(self.device.index or 0)["allocation"]["all"]
        return int(blocks["allocated"] + blocks["freed"])

    def now(self) -> int:
        """Return the number of events so far."""
        return self._events() - self._before

    def set_owner(self, number: int) -> None:
        """Log the allocations that follow under this number."""
        self._owners.append((self.now(), number))

    def events(self) -> np.ndarray:
        """Return the log, (events, 3) of int64: the address, the bytes (negative where freed), and the owner's number."""
        signs = {"alloc": 1, "free_completed": -1}
        blocks = [e for e in self._entries if e["action"] in signs]
        begins = [begin for begin, _ in self._owners]
        rows = [
            (e["addr"], signs[e["action"]] * e["size"], self._owners[bisect_right(begins, time) - 1][1])
            for time, e in enumerate(blocks)
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    def streams(self) -> np.ndarray:
        """Return the stream of each event."""
        return np.array(
            [e["stream"] for e in self._entries if e["action"] in ("alloc", "free_completed")], dtype=np.int64
        )
