"""Start the processes of one run on this machine, watch them, and end them together.

torchrun does this too, and recipes run under it as well. This launcher differs where users of one machine feel it: it
keeps the workers' exit status, listens on the loopback only, names the rank that died, and leaves no orphan when it is
killed itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

GRACE_S = 5.0  # between SIGTERM and SIGKILL for peers of a dead rank
PREEMPTION_GRACE_S = 30.0  # for a run that was asked to stop: time to save
POLL_S = 0.05
PR_SET_PDEATHSIG = 1
PEER_EXIT_STATUS = 7


def launch(command: Sequence[str], nproc: int, *, environment: dict[str, str] | None = None) -> int:
    """Run `command` as `nproc` ranks; 0 when all ended well, else the exit status of the first that did not.

    A rank killed by a signal gives 7. SIGTERM and SIGINT are passed on, and the ranks' own statuses returned.
    """
    from torch.distributed import TCPStore

    # The rendezvous lives here, on a port the system chose: no race for a free port between runs.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    base = {**os.environ, **(environment or {})}
    base |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks connect to that store instead of starting one
        "TORCHELASTIC_RESTART_COUNT": "0",  # asked for by torch 2.5
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GLOO_SOCKET_IFNAME": base.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    ranks = [
        subprocess.Popen(
            list(command),
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        for rank in range(nproc)
    ]
    return _watch(ranks)


def die_with_parent() -> None:
    """In the child, before exec: the kernel kills it when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(ranks: list[subprocess.Popen[bytes]]) -> int:
    asked_at: float | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        asked_at = asked_at or time.monotonic()
        _signal(ranks, signal.Signals(number))

    previous = {s: signal.signal(s, pass_on) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = [(i, code) for i, code in enumerate(codes) if code]
            if failed and asked_at is None:
                _end(ranks, GRACE_S)
                return _explain(*_first_cause(failed))
            if all(code is not None for code in codes):
                return max((_status(code) for code in codes if code is not None), default=0)
            if asked_at is not None and time.monotonic() - asked_at > PREEMPTION_GRACE_S:
                _end(ranks, 0.0)
                return PEER_EXIT_STATUS
            time.sleep(POLL_S)
    finally:
        _end(ranks, 0.0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _first_cause(failed: list[tuple[int, int]]) -> tuple[int, int]:
    """Of ranks found dead together, one killed by a signal or with an error of its own, not one that missed a peer."""
    return min(failed, key=lambda pair: (pair[1] == PEER_EXIT_STATUS, pair[0]))


def _explain(rank: int, code: int) -> int:
    if code < 0:
        name = signal.Signals(-code).name
        print(f"gptscale: error: rank {rank} was killed by {name}, the others were ended", file=sys.stderr, flush=True)
    return _status(code)


def _status(code: int) -> int:
    return PEER_EXIT_STATUS if code < 0 else code


def _signal(ranks: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _end(ranks: list[subprocess.Popen[bytes]], grace_s: float) -> None:
    """SIGTERM, `grace_s` to go, SIGKILL; returns when all are gone."""
    if all(rank.poll() is not None for rank in ranks):
        return
    _signal(ranks, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(POLL_S)
    _signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait()
