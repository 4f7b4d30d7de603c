"""Start the processes of one run on this machine, watch them, and end them together.

torchrun does this too, and recipes run under it as well. This launcher differs where users of one machine feel it: it
keeps the workers' exit status, opens no port, names the rank that died, and leaves no orphan when it is killed itself. On
CPUs it forks the ranks from a warm parent (warm_parent.py), which spares each the imports.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from gptscale.common.errors import INTERRUPTED_EXIT_STATUS, PeerError, cannot_start
from gptscale.common.process.begin import hang_up_ends, whole_lines
from gptscale.common.process.program import Program
from gptscale.common.process.shared_memory import HEARTBEATS, RENDEZVOUS, memory_file
from gptscale.common.process.warm_parent import Process, start_process

# seconds between SIGTERM and SIGKILL for peers of a dead rank, each of which first says whom it misses
GRACE_S = 15.0
# seconds that a run has to save after it was asked to stop
PREEMPTION_GRACE_S = 30.0
POLL_S = 0.02


def launch(program: Program, nproc: int, *, environment: Mapping[str, str] | None = None, fork: bool = True) -> int:
    """Run `program` as `nproc` ranks and return 0 when all ended well, else the exit status of the first that did not.

    environment: variables beside this process's own. fork: whether ranks may be forked from a warm parent, which ranks that
    use CUDA may not. A rank killed by a signal gives 7. SIGTERM and SIGINT are passed on, and the ranks' own statuses
    returned, or 130 if SIGINT ended a rank.
    """
    ranks: list[Process] = []
    requests: list[tuple[signal.Signals, float]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        requests.append((signal.Signals(number), time.monotonic()))
        _signal(ranks, signal.Signals(number))

    _check_limit(program, nproc)
    hang_up_ends()
    whole_lines()
    previous = {s: signal.signal(s, pass_on) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        with memory_file("rendezvous") as rendezvous, memory_file("heartbeats") as heartbeats:
            # Programs that a rank starts do not import from the current folder either.
            variables = {**os.environ, **(environment or {}), **({"PYTHONSAFEPATH": "1"} if program.is_ours else {})}
            variables |= {RENDEZVOUS: rendezvous, HEARTBEATS: heartbeats}
            variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(nproc))
            variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
            for rank in range(nproc):
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(start_process(program, variables, fork=fork))
            if requests:
                # The rank that was being started has not heard of it.
                _signal(ranks, requests[0][0])
            return _watch(ranks, heartbeats, requests)
    finally:
        _end(ranks, 0.0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_limit(program: Program, nproc: int) -> None:
    """Raise GptscaleError if this user may not have as many processes and threads as the ranks will. Root has no limit."""
    limit, own = resource.getrlimit(resource.RLIMIT_NPROC)[0], os.environ.get("OMP_NUM_THREADS", "")
    threads = int(own) if own.isdecimal() else max(1, len(os.sched_getaffinity(0)) // nproc)
    # Beside the threads that compute, ranks that talk have gloo's, autograd's and the heartbeat's.
    needed = 2 + nproc * (threads + (5 if nproc > 1 else 0))
    if program.is_ours and os.getuid() and resource.RLIM_INFINITY != limit < needed:
        raise cannot_start(f"{nproc} ranks of {threads} computing threads have {needed}, and {limit} are allowed")


def _watch(ranks: Sequence[Process], heartbeats: str, requests: Sequence[tuple[signal.Signals, float]]) -> int:
    """Wait for the ranks, and return what `launch` returns.

    heartbeats: the file of what they tell. requests: the signals that asked for an end, each with its time; the caller adds to
    them.
    """
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [(i, code) for i, code in enumerate(codes) if code]
        if failed and not requests:
            _end(ranks, GRACE_S)
            # One with an error of its own comes before one that missed a peer.
            return _explain(*min(failed, key=lambda pair: (pair[1] == PeerError.exit_status, pair[0])), heartbeats)
        if all(code is not None for code in codes):
            if requests and any(code == -requests[0][0] for _, code in failed):
                fix = "start it again, with --resume if it had saved before"
                name = requests[0][0].name
                print(f"gptscale: error: ended by {name}, before it could save, {fix}", file=sys.stderr, flush=True)
            return max((_status(code) for code in codes if code is not None), default=0)
        if requests and time.monotonic() - requests[0][1] > PREEMPTION_GRACE_S:
            _end(ranks, 0.0)
            return PeerError.exit_status
        time.sleep(POLL_S)


def _explain(rank: int, code: int, heartbeats: str) -> int:
    if code < 0:
        from gptscale.common.process.heartbeat import Slots, beat_of

        beat, name = beat_of(Slots(heartbeats), rank), signal.Signals(-code).name
        seen = f" (last seen {beat.place})" if beat else ""
        said = f"gptscale: error: rank {rank} was killed by {name}{seen}, the others were ended"
        print(said, file=sys.stderr, flush=True)
    return _status(code)


def _status(code: int) -> int:
    return INTERRUPTED_EXIT_STATUS if code == -signal.SIGINT else PeerError.exit_status if code < 0 else code


def _signal(ranks: Sequence[Process], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _end(ranks: Sequence[Process], grace_s: float) -> None:
    """End the ranks by SIGTERM, and after `grace_s` seconds by SIGKILL. Returns when all have ended."""
    if all(rank.poll() is not None for rank in ranks):
        return
    _signal(ranks, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(POLL_S)
    _signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait()
