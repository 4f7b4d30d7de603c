"""Where each rank was last seen, kept in the rendezvous store, so that a rank that died or fell silent can be named."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple, Protocol

import torch.distributed as dist

from gptscale.common.process.progress import Progress, progress
from gptscale.common.process.rendezvous import has_launchers_store, prefix_of_start

INTERVAL_S = 0.5
# A rank whose beat does not change for this long, while others look at it, is silent.
SILENT_S = 3 * INTERVAL_S


class Store(Protocol):
    """What is used of torch's stores, by ranks and by the launcher."""

    def set(self, key: str, value: str) -> object: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Beat(NamedTuple):
    """The last place that a rank told: how long it had been there, and when it told so, by its host's clock."""

    number: int
    step: int
    part: str
    waits: bool
    for_s: float
    at_s: float

    @property
    def place(self) -> str:
        return f"at step {self.step} in {self.part}"


def beat_of(store: Store, rank: int, has_launchers: bool | None = None) -> Beat | None:
    """Return the last beat of a rank, or None if it has not told any. has_launchers: as of `prefix_of_start`."""
    key = _key(rank, has_launchers)
    return Beat(*json.loads(store.get(key))) if store.check([key]) else None


def _key(rank: int, has_launchers: bool | None = None) -> str:
    return f"gptscale/heartbeat/{prefix_of_start(has_launchers)}/{rank}"


class Heartbeat:
    """A thread that tells this rank's place every half second. Without peers, or without a store, it does nothing."""

    def __init__(self, rank: int, world_size: int, store: Store | None, own: Progress = progress) -> None:
        self.rank, self.world_size, self.store, self.progress = rank, world_size, store, own
        self._number = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gptscale-heartbeat", daemon=True)

    @classmethod
    def of_world(cls, rank: int, world_size: int) -> Heartbeat:
        """Return the heartbeat of a rank, over a connection of its own to the rendezvous store of the environment."""
        return cls(rank, world_size, _connect() if world_size > 1 else None)

    def __enter__(self) -> Heartbeat:
        if self.store is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def here(self) -> Beat:
        """Return this rank's own place now."""
        own = self.progress
        return Beat(self._number, own.step, own.part, own.waits, own.clock() - own.since, time.time())

    def missing(self) -> tuple[str, str] | None:
        """Return which rank keeps the others waiting, and where it was last seen, or None if that cannot be told.

        It is the rank whose heart no longer beats. If all beat, it is the one that waits for no other and is furthest behind.
        It takes a second and a half to see who is silent.
        """
        here = self.here()
        self.progress.at("failed")
        if self.store is None:
            return None
        # The launcher asks the peers of a dead rank to end. This one is about to, and has something to say first.
        handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        own, before = f"while rank {self.rank} was {here.place}", None
        try:
            before = self._others()
            time.sleep(SILENT_S)
            after = self._others()
        except RuntimeError:
            # The store is gone.
            is_of_rank_0 = before is None and self.rank and not has_launchers_store()
            return ("rank 0", f"with the rendezvous that it served, {own}") if is_of_rank_0 else None
        finally:
            signal.signal(signal.SIGTERM, handler)
        now = time.time()
        silent = {rank: beat for rank, beat in after.items() if before.get(rank) == beat}
        busy = {rank: beat for rank, beat in after.items() if not beat.waits}
        if silent:
            rank = min(silent, key=lambda r: silent[r].at_s)
            return f"rank {rank}", f"last seen {now - silent[rank].at_s:.0f} s ago {silent[rank].place}, {own}"
        if busy:
            rank = min(busy, key=lambda r: (busy[r].step, -busy[r].for_s))
            return f"rank {rank}", f"for {busy[rank].for_s:.0f} s {busy[rank].place}, {own}"
        return None

    def _others(self) -> Mapping[int, Beat]:
        """Return the beats of the other ranks, without those that have failed themselves."""
        assert self.store is not None
        beats = {rank: beat_of(self.store, rank) for rank in range(self.world_size) if rank != self.rank}
        return {rank: beat for rank, beat in beats.items() if beat is not None and beat.part != "failed"}

    def _beat(self) -> None:
        assert self.store is not None
        began = time.monotonic()
        while True:
            self._number += 1
            try:
                self.store.set(_key(self.rank), json.dumps(self.here()))
            except RuntimeError:
                # The store is gone, and the run with it.
                return
            if self._closed.wait(INTERVAL_S):
                return
            now = time.monotonic()
            if now - began > 2 * INTERVAL_S:
                self.progress.stood_still(now - began - INTERVAL_S)
            began = now


def _connect() -> Store | None:
    """Return a client of the rendezvous store, or None if it cannot be reached. No run fails because of its heartbeat."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (host and port):
        return None
    try:
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    except (RuntimeError, ValueError):
        return None
