"""The last known place of each rank, where all can read it, so that a rank that died or fell silent can be named."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from gptscale.common.errors import ConfigError
from gptscale.common.process.progress import BETWEEN_STEPS, OWN_PARTS, Progress, progress
from gptscale.common.process.rendezvous import open_store, prefix_of_start, rank_0_serves
from gptscale.common.process.shared_memory import HEARTBEATS, SLOT, Slots

INTERVAL_S = 0.5
# A rank whose beat does not change for this long, while others look at it, is silent.
SILENT_S = 3 * INTERVAL_S


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


def beat_of(beats: Beats, rank: int) -> Beat | None:
    """Return the last beat of a rank, or None if it has written none, or something else was written in its place."""
    try:
        fields = json.loads(beats.get(rank)[:SLOT])
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, list) or [type(field) for field in fields] != [int, int, str, bool, float, float]:
        return None
    return Beat(*fields) if fields[2] in (*OWN_PARTS, *BETWEEN_STEPS) else None


class StoreBeats:
    """Heartbeats in the store behind a port, over a connection of their own, with the methods of Slots."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore(f"gptscale/heartbeat/{prefix_of_start()}", store)

    def set(self, rank: int, words: str) -> None:
        self._store.set(str(rank), words)

    def get(self, rank: int) -> bytes:
        return self._store.get(str(rank)) if self._store.check([str(rank)]) else b""


# A place for the heartbeat of each rank.
Beats = Slots | StoreBeats


class Heartbeat:
    """A thread that tells this rank's place every half second. Without peers, or if nobody can read it, it does nothing."""

    def __init__(self, rank: int, world_size: int, beats: Beats | None, own: Progress = progress) -> None:
        self.rank, self.world_size, self.beats, self.progress = rank, world_size, beats, own
        self._number = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gptscale-heartbeat", daemon=True)

    @classmethod
    def of_world(cls, rank: int, world_size: int) -> Heartbeat:
        """Return the heartbeat of a rank, in the place that the environment names. No run fails because of its heartbeat."""
        beats: Beats | None = None
        if world_size > 1 and (path := os.environ.get(HEARTBEATS)):
            beats = Slots(path)
        elif world_size > 1:
            with suppress(ConfigError):
                beats = StoreBeats(open_store(-1, timeout_s=10.0))
        return cls(rank, world_size, beats)

    def __enter__(self) -> Heartbeat:
        if self.beats is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def here(self) -> Beat:
        own = self.progress
        return Beat(self._number, own.step, own.part, own.waits, own.clock() - own.since, time.time())

    def missing(self) -> tuple[str, str] | None:
        """Return which rank keeps the others waiting, and where it was last seen, or None if that cannot be told.

        It is the rank whose heart no longer beats. If all beat, it is the one that waits for no other and is furthest behind.
        It takes a second and a half to see who is silent.
        """
        here = self.here()
        self.progress.at("failed")
        if self.beats is None:
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
            is_of_rank_0 = before is None and self.rank and rank_0_serves()
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
        assert self.beats is not None
        beats = {rank: beat_of(self.beats, rank) for rank in range(self.world_size) if rank != self.rank}
        return {rank: beat for rank, beat in beats.items() if beat is not None and beat.part != "failed"}

    def _beat(self) -> None:
        assert self.beats is not None
        began = time.monotonic()
        while True:
            self._number += 1
            try:
                self.beats.set(self.rank, json.dumps(self.here()))
            except RuntimeError:
                # The store is gone, and the run with it.
                return
            if self._closed.wait(INTERVAL_S):
                return
            now = time.monotonic()
            if now - began > 2 * INTERVAL_S:
                self.progress.stood_still(now - began - INTERVAL_S)
            began = now
