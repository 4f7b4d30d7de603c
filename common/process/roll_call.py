"""The roll call of a start: each rank signs in with what it was started with, or leaves why it was refused.

It goes through the rendezvous, before any rank connects to another. Without it the other ranks would wait for a refused one
until a timeout, and could not say why it never came. Whoever reaches a rendezvous that is a port can write there too. So what
is read is cut, and only what has the form of an entry counts.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from gptscale.common.errors import ConfigError, GptscaleError, PeerError, first_line
from gptscale.common.process.rendezvous import REACH_S, RendezvousError, open_store, prefix_of_start, whole_number

# After a mistake of all ranks rank 0 says it for all. This is how long a refused rank waits to see whether rank 0 comes.
RANK_0_S = 5.0
# How long others wait beyond the time in which rank 0 decides.
LONGER_S = 10.0
# How long ranks that wait take to read the outcome.
READ_S = 2.0
POLL_S = 0.02
RANKS_MAX = 2**20
# The bytes of an entry that are read.
ENTRY_MAX = 1 << 20
WHERE = "in the rendezvous"
# Beside a key for the entry of each rank: what rank 0 decided, and how many ranks have read it.
OUTCOME, READ = "outcome", "read"


class RefusedError(ConfigError):
    """A start that the roll call refused. is_said: whether another rank of this machine prints why."""

    is_said = False


class Refusal(NamedTuple):
    """Why no rank may go on. rank: the one that was refused, -1 if none was alone. status: the exit status of an error."""

    rank: int
    host: str
    status: int
    what: str
    where: str
    fix: str

    @classmethod
    def of(cls, error: GptscaleError, rank: int = -1) -> Refusal:
        return cls(rank, socket.gethostname(), error.exit_status, error.what, error.where, error.fix)

    @property
    def is_near(self) -> bool:
        """Whether the refused rank prints to the same terminal as this one."""
        return self.host == socket.gethostname() or os.environ.get("LOCAL_RANK", "0") != "0"

    def error(self) -> GptscaleError:
        """Return the error that every rank which reads this raises."""
        if self.status == PeerError.exit_status:
            return PeerError(self.what, self.where, self.fix)
        if self.rank < 0:
            return RefusedError(self.what, self.where, self.fix)
        refused = RefusedError(f"rank {self.rank} was refused: {self.what}", self.where, self.fix)
        refused.is_said = self.is_near
        return refused


class RollCall:
    """The roll call of one start, over a store that all its ranks reach."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = dist.PrefixStore(f"gptscale/roll call/{prefix_of_start()}", store)

    @classmethod
    def of_environment(cls) -> RollCall | None:
        """Return that of a rank that was refused before it knew its world, or None if it has no peers or cannot reach them."""
        try:
            world_size = whole_number("WORLD_SIZE", 1, 1, RANKS_MAX)
            rank = whole_number("RANK", 0, 0, world_size - 1)
            return None if world_size == 1 else cls(open_store(rank, REACH_S), rank, world_size)
        except ConfigError:
            return None

    def sign_in(self, facts: Mapping[str, str], timeout_s: float) -> None:
        """Say what this rank was started with, and return when all ranks have come with the same.

        Raises the same error on every rank: RefusedError with the words of a rank that was refused, or with all that differs, and
        PeerError if a rank does not come within `timeout_s`.
        """
        try:
            self._put(f"rank {self.rank}", dict(facts))
            if self.rank == 0:
                self._put(OUTCOME, self._judge(timeout_s))
            outcome = self._outcome(timeout_s + LONGER_S)
        except RuntimeError as error:
            # torch raises it for every error of a store.
            what = f"rank 0 ended or fell silent before the start ({first_line(error)})"
            raise PeerError(what, WHERE, "see its own message") from None
        if isinstance(outcome, Refusal):
            # A rank that never came does not read.
            self.leave(READ_S if outcome.status == PeerError.exit_status else REACH_S)
            raise outcome.error()

    def refuse(self, error: GptscaleError) -> bool:
        """Leave why this rank was refused, and return whether rank 0 says the same, so that this rank need not."""
        own, outcome = Refusal.of(error, self.rank), None
        with suppress(RuntimeError, ConfigError):
            self._put(f"rank {self.rank}", own)
            if self.rank == 0:
                self._put(OUTCOME, own)
            outcome = self._outcome(RANK_0_S)
        if not isinstance(outcome, Refusal) or outcome.rank or not self.rank:
            return False
        return outcome.is_near and outcome[3:] == own[3:]

    def leave(self, limit_s: float = REACH_S) -> None:
        """Wait, as rank 0, until the others have read the outcome. The end of this process may be the end of the store."""
        deadline = time.monotonic() + limit_s
        with suppress(RuntimeError):
            while self.rank == 0 and self._store.add(READ, 0) < self.world_size and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def _judge(self, timeout_s: float) -> Refusal | None:
        """Wait for all ranks, as rank 0, and return why they may not go on. The first that was refused ends the wait."""
        deadline, facts, missing = time.monotonic() + timeout_s, dict[int, Any](), [*range(self.world_size)]
        try:
            while missing:
                for rank in missing:
                    if self._store.check([f"rank {rank}"]):
                        facts[rank] = self._entry(f"rank {rank}") or {}
                        if isinstance(facts[rank], Refusal):
                            return Refusal(*facts[rank])
                missing = [rank for rank in missing if rank not in facts]
                if missing and time.monotonic() > deadline:
                    what = f"rank {_listed(missing)} did not come within {timeout_s:g} s"
                    raise PeerError(what, WHERE, "look for its own message")
                time.sleep(POLL_S if missing else 0.0)
            check_same_on_ranks([facts[rank] for rank in range(self.world_size)])
        except (ConfigError, PeerError) as error:
            return Refusal.of(error)
        return None

    def _outcome(self, limit_s: float) -> dict[str, str] | Refusal | None:
        try:
            self._store.wait([OUTCOME], timedelta(seconds=limit_s))
            outcome = self._entry(OUTCOME)
            if outcome is not None and threading.current_thread() is threading.main_thread():
                # A launcher ends the others by SIGTERM when one refused rank has ended. Each says why first, and ends by itself.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return outcome
        finally:
            # Only now: rank 0 may end, and the store with it, when all have read, or have waited for rank 0 in vain.
            self._store.add(READ, 1)

    def _put(self, key: str, entry: object) -> None:
        self._store.set(key, json.dumps(entry))

    def _entry(self, key: str) -> dict[str, str] | Refusal | None:
        """Return the facts of a rank, or why it was refused, or None, or raise ConfigError."""
        content = self._store.get(key)
        with suppress(ValueError, RecursionError):
            value = json.loads(content) if len(content) <= ENTRY_MAX else 0
            if value is None or (isinstance(value, dict) and all(isinstance(fact, str) for fact in value.values())):
                return value
            if isinstance(value, list) and [type(field) for field in value] == [int, str, int, str, str, str]:
                return Refusal(*value)
        what = f"the entry {key!r} was not written by gptscale ({content[:20]!r})"
        raise ConfigError(what, WHERE, "see who else can reach its port")


def refuse(error: GptscaleError) -> None:
    """Print in one line why this rank cannot start, and leave it for the ranks that would wait for it.

    Most often all ranks find the same, and rank 0 says it for all.
    """
    if isinstance(error, (RefusedError, RendezvousError, PeerError)):
        # The others know already, or cannot be reached.
        if not (isinstance(error, RefusedError) and error.is_said):
            speak(error, of_all=True)
        return
    roll_call = RollCall.of_environment()
    if roll_call is None or not roll_call.refuse(error):
        speak(error)
    if roll_call is not None:
        roll_call.leave()


def speak(error: GptscaleError, *, of_all: bool = False) -> None:
    """Print an error of the start of this rank, with the number of the rank if it is not 0, or if all print it."""
    rank = os.environ.get("RANK", "0")
    says_rank = rank.isdecimal() and (rank != "0" or of_all)
    print(f"gptscale: error: {f'rank {rank}: ' if says_rank else ''}{error}", file=sys.stderr, flush=True)


def check_same_on_ranks(facts_of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError unless every rank has the facts of rank 0, with all that differ and the ranks that have each value."""
    differences = []
    for name in dict.fromkeys(name for facts in facts_of_ranks for name in facts):
        ranks_with: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_of_ranks):
            ranks_with.setdefault(str(facts.get(name)), []).append(rank)
        if len(ranks_with) > 1:
            values = (f"{value} on rank {_listed(ranks)}" for value, ranks in ranks_with.items())
            differences.append(f"{name} is {' but '.join(values)}")
    if differences:
        raise ConfigError("; ".join(differences), "in what the ranks were started with", "start all alike")


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    return ",".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
