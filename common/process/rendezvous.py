"""The rendezvous, by which the ranks of a run find each other.

Ranks of `gptscale run` have a file in the launcher's memory, which no other user can open. Ranks of torchrun or Slurm have a
port, which torch opens to everybody. It is checked here, because torch would try a wrong one for minutes.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta

import psutil
import torch.distributed as dist

from gptscale.common.errors import ConfigError, first_line
from gptscale.common.process.shared_memory import RENDEZVOUS

# For rank 0 to open the port, while others wait. With the start of Python a wrong address is told within 30 seconds.
REACH_S = 25.0
# For a port that is open to answer. A store does at once.
SILENCE_S = 10.0
# First questions to torch's TCPStore: a magic number behind the query 0, then behind the query 13 a number that it sends back.
NUMBER = (0x67707473).to_bytes(4, "little")
HELLO = b"\0" + (0x3C85F7CE).to_bytes(4, "little") + b"\x0d" + NUMBER
START = "start with `gptscale run` or torchrun"
IN_PORT = "in MASTER_ADDR and MASTER_PORT"


class RendezvousError(ConfigError):
    """A rendezvous that this rank, and perhaps no other, cannot reach."""


def open_store(rank: int, timeout_s: float) -> dist.Store:
    """Return this rank's connection to the rendezvous, which rank 0 opens unless a launcher did, or raise ConfigError."""
    timeout = timedelta(seconds=timeout_s)
    if path := os.environ.get(RENDEZVOUS):
        if not os.access(path, os.R_OK | os.W_OK):
            raise RendezvousError(f"{path} is not there", f"in {RENDEZVOUS}", START)
        store = dist.FileStore(path, -1)
        store.set_timeout(timeout)
        return store
    address = os.environ.get("MASTER_ADDR")
    if not address:
        raise ConfigError("MASTER_ADDR is not set", "in the environment", START)
    port = whole_number("MASTER_PORT", None, 1, 65535)
    if serves := rank_0_serves() and rank == 0:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            why = f"is in use by {listener(port)}" if is_taken else f"cannot be opened ({error.strerror})"
            raise ConfigError(f"port {port} {why}", "in MASTER_PORT", "use another") from None
    else:
        reach(address, port, REACH_S)
    try:
        # torch's own rendezvous has rank 0 wait here until all ranks are connected, and a refused one never is.
        return dist.TCPStore(address, port, is_master=serves, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        what = f"{address}:{port} does not serve as a rendezvous ({first_line(error)})"
        fix = "see that rank 0 runs there, and that no other program has the port"
        raise RendezvousError(what, IN_PORT, fix) from None


def rank_0_serves() -> bool:
    """Return whether rank 0 opens the rendezvous. Else a launcher holds it, and it outlives ranks that are started again."""
    return RENDEZVOUS not in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def warn_of_open_port() -> None:
    """Warn that others can write to the port of the rendezvous, if it has one. Rank 0 says it for all."""
    if RENDEZVOUS not in os.environ:
        by = "rank 0" if rank_0_serves() else "torchrun"
        what = f"{by} lets every machine that reaches this one write to port {os.environ['MASTER_PORT']}, on all interfaces"
        fix = "use a firewall, or `gptscale run` on a single machine"
        said = f"gptscale: warning: {what} and without a password, in the rendezvous, {fix}"
        print(said, file=sys.stderr, flush=True)


def prefix_of_start() -> str:
    """Return the first word of this start's keys, so that addresses of the dead are not taken for those of the living.

    Machines count restarts each for itself, so that the count is used only where ranks of an earlier start may be read.
    """
    return "start" if rank_0_serves() else f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def whole_number(name: str, default: int | None, low: int, high: int) -> int:
    """Return an environment variable that is a whole number in [low, high], or raise ConfigError."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text:
        raise ConfigError(f"{name} is not set", "in the environment", START)
    if not (text.isascii() and text.isdecimal() and low <= int(text[:10]) <= high):
        raise ConfigError(f"{name} is {text[:40]!r}, expected {low} to {high}", "in the environment", START)
    return int(text)


def listener(port: int) -> str:
    """Name the process of this machine that listens on a port, as far as this user may see it."""
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr[1:] == (port,) and one.pid:
            with suppress(psutil.NoSuchProcess):
                return f"process {one.pid} ({psutil.Process(one.pid).name()})"
    return "a process of another user"


def reach(address: str, port: int, limit_s: float) -> None:
    """Raise RendezvousError unless a store of torch answers at a port within `limit_s` seconds.

    Something that answers, but not as a store does, such as a web server, is refused at once.
    """
    began = time.monotonic()
    deadline = began + limit_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            answer, reason = _answer_of(address, port, max(1.0, left_s)), "it takes the connection and says nothing"
            deadline = min(deadline, time.monotonic() + SILENCE_S)
        except OSError as error:
            # Rank 0 may be starting still, and its name may not be known yet.
            answer, reason = b"", error.strerror or str(error)
        if answer == NUMBER:
            return
        if answer:
            what = f"{address}:{port} is no rendezvous (it answers {answer!r})"
            raise RendezvousError(what, IN_PORT, "give the address at which rank 0 listens")
        if left_s < 1:
            what = f"{address}:{port} did not answer for {time.monotonic() - began:.0f} s ({reason})"
            raise RendezvousError(what, IN_PORT, "see that rank 0 runs there, and that nothing blocks the port")
        time.sleep(0.1)


def _answer_of(address: str, port: int, limit_s: float) -> bytes:
    """Return what a port answers to HELLO: NUMBER if it is torch's store, and nothing if no answer comes within two seconds.

    Raises OSError unless somebody listens there within `limit_s` seconds.
    """
    answer = b""
    with socket.create_connection((address, port), timeout=limit_s) as connection, suppress(OSError):
        connection.settimeout(min(2.0, limit_s))
        connection.sendall(HELLO)
        while len(answer) < len(NUMBER) and (more := connection.recv(len(NUMBER) - len(answer))):
            answer += more
    return answer if len(answer) == len(NUMBER) else b""
