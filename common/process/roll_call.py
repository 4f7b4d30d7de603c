"""The roll call of a start: each rank signs in with what it was started with, or leaves why it was refused.

It goes through the rendezvous store, before any rank connects to another. Without it the other ranks would wait for a refused
one until a timeout, and could not say why it never came.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from gptscale.common.errors import ConfigError, GptscaleError, PeerError
from gptscale.common.process.rendezvous import (
    REACH_S,
    RendezvousError,
    has_launchers_store,
    prefix_of_start,
    reach,
    whole_number,
)

# After a mistake of all ranks rank 0 says it for all. This is how long a refused rank waits to see whether rank 0 comes.
RANK_0_S = 5.0
# How long others wait beyond the time in which rank 0 decides.
LONGER_S = 10.0
# How long ranks that wait take to read the outcome.
READ_S = 2.0
RANKS_MAX = 2**20
# The keys of a roll call: what a rank signs in with, how many have, whether rank 0 came and how, whether all came or one was
# refused, how many have decided on the outcome, of which the first counts, the outcome, how many have read it, and whether all
# have.
COUNT, RANK_0, COMPLETE, DECIDED = "count", "rank 0 came", "complete", "decided"
OUTCOME, READ, ALL_READ = "outcome", "read", "all read"


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

    def error(self) -> GptscaleError:
        """Return the error that every rank which reads this raises."""
        if self.status == PeerError.exit_status:
            return PeerError(self.what, self.where, self.fix)
        if self.rank < 0:
            return RefusedError(self.what, self.where, self.fix)
        refused = RefusedError(f"rank {self.rank} was refused: {self.what}", self.where, self.fix)
        refused.is_said = self.host == socket.gethostname() or os.environ.get("LOCAL_RANK", "0") != "0"
        return refused


def open_store(rank: int, timeout_s: float) -> Any:
    """Return this rank's connection to the rendezvous store, which rank 0 opens unless the launcher did, or raise ConfigError."""
    address, port = os.environ["MASTER_ADDR"], whole_number("MASTER_PORT", None, 1, 65535)
    serves = rank == 0 and not has_launchers_store()
    try:
        # torch's own rendezvous has rank 0 wait here until all ranks are connected, and a refused one never is.
        timeout = timedelta(seconds=timeout_s)
        return dist.TCPStore(address, port, is_master=serves, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:160]
        raise ConfigError(
            f"{address}:{port} does not serve as a rendezvous ({reason})",
            "in MASTER_ADDR and MASTER_PORT",
            "see that rank 0 runs there, and that no other program has the port",
        ) from None


class RollCall:
    """The roll call of one start, over a store that all its ranks reach."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = dist.PrefixStore(f"gptscale/roll call/{prefix_of_start()}", store)

    @classmethod
    def of_environment(cls, limit_s: float) -> RollCall | None:
        """Return that of a rank that was refused before it knew its world, or None if it has no peers or cannot reach them."""
        try:
            world_size = whole_number("WORLD_SIZE", 1, 1, RANKS_MAX)
            rank, port = whole_number("RANK", 0, 0, world_size - 1), whole_number("MASTER_PORT", None, 1, 65535)
            if world_size == 1:
                return None
            if rank or has_launchers_store():
                reach(os.environ["MASTER_ADDR"], port, limit_s)
            return cls(open_store(rank, REACH_S), rank, world_size)
        except (ConfigError, KeyError):
            return None

    def sign_in(self, facts: Mapping[str, str], timeout_s: float) -> None:
        """Say what this rank was started with, and return when all ranks have come with the same.

        Raises the same error on every rank: RefusedError with the words of a rank that was refused, or with all that differs, and
        PeerError if a rank does not come within `timeout_s`.
        """
        try:
            self._store.set(f"rank {self.rank}", json.dumps(dict(facts)))
            if self.rank == 0:
                self._store.set(RANK_0, json.dumps(None))
            if self._store.add(COUNT, 1) == self.world_size:
                self._store.set(COMPLETE, "")
            if self.rank == 0:
                self._decide(timeout_s)
            self._store.wait([OUTCOME], timedelta(seconds=timeout_s + LONGER_S))
            content = json.loads(self._store.get(OUTCOME))
            self._has_read()
        except RuntimeError as error:
            # torch raises it for every error of a store.
            reason = str(error).splitlines()[0][:160]
            raise PeerError(
                f"rank 0 ended or fell silent before the start ({reason})", "in the rendezvous", "see its own message"
            ) from None
        if content is not None:
            refusal = Refusal(*content)
            if self.rank == 0:
                # A rank that never came does not read.
                self._stay(READ_S if refusal.status == PeerError.exit_status else REACH_S)
            raise refusal.error()

    def refuse(self, error: GptscaleError) -> None:
        """Leave why this rank was refused, for those that wait for it, unless they know of another."""
        with suppress(RuntimeError):
            if self.rank == 0:
                self._store.set(RANK_0, json.dumps(Refusal.of(error)))
            self._put_outcome(Refusal.of(error, self.rank))
            self._store.set(COMPLETE, "")

    def rank_0_says(self, error: GptscaleError) -> bool:
        """Return whether rank 0 was refused for the same reason, and says so where this rank need not say it again."""
        with suppress(RuntimeError):
            self._store.wait([RANK_0], timedelta(seconds=RANK_0_S))
            content = json.loads(self._store.get(RANK_0))
            if content is not None:
                refusal, own = Refusal(*content), Refusal.of(error)
                is_near = refusal.host == own.host or os.environ.get("LOCAL_RANK", "0") != "0"
                return is_near and refusal[3:] == own[3:]
        return False

    def leave(self) -> None:
        """Go, as a refused rank. The one that serves the store keeps it open until all have read the outcome."""
        with suppress(RuntimeError):
            self._has_read()
            if self.rank == 0 and not has_launchers_store():
                self._stay(REACH_S)

    def _decide(self, timeout_s: float) -> None:
        """Wait for all ranks, as rank 0, and leave the outcome on what they say, unless one was refused."""
        numbers, error = range(self.world_size), None
        try:
            self._store.wait([COMPLETE], timedelta(seconds=timeout_s))
            if self._store.check([OUTCOME]):
                return
            check_same_on_ranks([json.loads(self._store.get(f"rank {rank}")) for rank in numbers])
        except ConfigError as differing:
            error = Refusal.of(differing)
        except RuntimeError:
            missing = [rank for rank in numbers if not self._store.check([f"rank {rank}"])]
            several, pronoun = ("s", "their") if len(missing) > 1 else ("", "its")
            what = f"rank{several} {_listed(missing)} did not come within {timeout_s:g} s"
            error = Refusal.of(PeerError(what, "in the rendezvous", f"look for {pronoun} own messages"))
        self._put_outcome(error)

    def _put_outcome(self, refusal: Refusal | None) -> None:
        """Put the outcome into the store, unless another rank has."""
        # Not by compare_set, which wakes no rank that waits for the key in the store of our launcher.
        if self._store.add(DECIDED, 1) == 1:
            self._store.set(OUTCOME, json.dumps(refusal))

    def _has_read(self) -> None:
        if self._store.add(READ, 1) == self.world_size:
            self._store.set(ALL_READ, "")

    def _stay(self, limit_s: float) -> None:
        with suppress(RuntimeError):
            self._store.wait([ALL_READ], timedelta(seconds=limit_s))


def refuse(error: GptscaleError) -> None:
    """Print in one line why this rank cannot start, and leave it for the ranks that would wait for it.

    Most often all ranks find the same, and rank 0 says it for all.
    """
    if isinstance(error, (RefusedError, RendezvousError, PeerError)):
        # The others know already, or cannot be reached.
        if not (isinstance(error, RefusedError) and error.is_said):
            speak(error, of_all=True)
        return
    began = time.monotonic()
    roll_call = RollCall.of_environment(RANK_0_S)
    if roll_call is None:
        speak(error)
        # The one that opens the rendezvous may be slower. Nobody else would tell it.
        roll_call = RollCall.of_environment(REACH_S - (time.monotonic() - began))
        if roll_call is not None:
            roll_call.refuse(error)
            roll_call.leave()
        return
    roll_call.refuse(error)
    if roll_call.rank == 0 or not roll_call.rank_0_says(error):
        speak(error)
    # Last, because rank 0 ends, and with it perhaps the store, when all have read.
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
