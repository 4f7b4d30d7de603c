"""The checks of the rendezvous, by which the ranks of a run find each other, before torch's own code tries for minutes."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from gptscale.common.errors import ConfigError

# For rank 0 to open the rendezvous, while others wait. With the start of Python a wrong address is told within 30 seconds.
REACH_S = 25.0
# What torch's TCPStore is asked first: a magic number behind the query 0, then behind the query 13 a number that it sends back.
NUMBER = (0x67707473).to_bytes(4, "little")
HELLO = b"\0" + (0x3C85F7CE).to_bytes(4, "little") + b"\x0d" + NUMBER
START = "start with `gptscale run` or torchrun"


class RendezvousError(ConfigError):
    """A rendezvous that this rank, and perhaps no other, cannot reach."""


def check_rendezvous(rank: int) -> None:
    """Raise ConfigError unless the rendezvous can be opened by rank 0, and reached by the other ranks.

    torch would try for as long as a collective may take, and say so in a page of C++ frames. Rank 0 warns of what a
    rendezvous that torch opens offers to others.
    """
    address = os.environ.get("MASTER_ADDR")
    if not address:
        raise ConfigError("MASTER_ADDR is not set", "in the environment", START)
    port = whole_number("MASTER_PORT", None, 1, 65535)
    serves = rank == 0 and not has_launchers_store()
    if serves:
        _check_free(port)
    else:
        reach(address, port)
    if rank == 0 and (serves or "TORCHELASTIC_RUN_ID" in os.environ):
        by = "rank 0" if serves else "torchrun"
        print(
            f"gptscale: warning: {by} lets every machine that reaches this one write to port {port}, on all interfaces and "
            "without a password, in the rendezvous, use a firewall, or `gptscale run` on a single machine",
            file=sys.stderr,
            flush=True,
        )


def has_launchers_store() -> bool:
    """Return whether the launcher holds the store, which then outlives ranks that it starts again. Else rank 0 opens it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def prefix_of_start(has_launchers: bool | None = None) -> str:
    """Return the first word of this start's keys, so that addresses of the dead are not taken for those of the living.

    Machines count restarts each for itself, so that the count is used only where ranks of an earlier start may be read.
    has_launchers: whether the ranks have the launcher's store. The launcher itself says so, a rank is told by its environment.
    """
    if has_launchers_store() if has_launchers is None else has_launchers:
        return f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return "start"


def whole_number(name: str, default: int | None, low: int, high: int) -> int:
    """Return an environment variable that is a whole number in [low, high], or raise ConfigError."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text:
        raise ConfigError(f"{name} is not set", "in the environment", START)
    if not (text.isascii() and text.isdecimal() and low <= int(text[:10]) <= high):
        raise ConfigError(f"{name} is {text[:40]!r}, expected {low} to {high}", "in the environment", START)
    return int(text)


def _check_free(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} cannot be opened ({error.strerror})", "in MASTER_PORT", "use another"
            ) from None
        raise ConfigError(f"port {port} is in use by {listener(port)}", "in MASTER_PORT", "use another") from None


def reach(address: str, port: int, limit_s: float | None = None) -> None:
    """Raise RendezvousError unless somebody listens at a port within `limit_s` seconds, by default REACH_S.

    Something that answers, but not as a store does, such as a web server, is refused at once.
    """
    limit_s = REACH_S if limit_s is None else limit_s
    deadline = time.monotonic() + limit_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            if (answer := answer_of(address, port, max(1.0, left_s))) in (b"", NUMBER):
                return
            raise RendezvousError(
                f"{address}:{port} is no rendezvous (it answers {answer!r})",
                "in MASTER_ADDR and MASTER_PORT",
                "give the address at which rank 0 listens",
            )
        except OSError as error:
            # Rank 0 may be starting still, and its name may not be known yet.
            if left_s < 1:
                reason = error.strerror or str(error)
                raise RendezvousError(
                    f"{address}:{port} did not answer for {limit_s:g} s ({reason})",
                    "in MASTER_ADDR and MASTER_PORT",
                    "see that rank 0 runs there, and that nothing blocks the port",
                ) from None
        time.sleep(0.1)


def answer_of(address: str, port: int, limit_s: float) -> bytes:
    """Return what a port answers to HELLO: NUMBER if it is torch's store, and nothing if no answer comes within two seconds.

    Raises OSError unless somebody listens there within `limit_s` seconds.
    """
    answer = b""
    with socket.create_connection((address, port), timeout=limit_s) as connection, suppress(OSError):
        connection.settimeout(2.0)
        connection.sendall(HELLO)
        while len(answer) < len(NUMBER) and (more := connection.recv(len(NUMBER) - len(answer))):
            answer += more
    return answer if len(answer) == len(NUMBER) else b""


def listener(port: int) -> str:
    """Name the process of this machine that listens on a port, as far as this user may see it."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        lines = Path(table).read_text().splitlines()[1:] if Path(table).exists() else []
        rows = [line.split() for line in lines]
        sockets |= {
            f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
        }
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) in sockets:
                process = descriptor.parents[1]
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:
            # It has ended, or belongs to another user.
            continue
    return "a process of another user"
