"""A port for a rendezvous that a test names."""

import socket
from contextlib import suppress
from random import SystemRandom


def next_port() -> int:
    """Return a port that nobody listens on, below those that the kernel gives meanwhile to whoever connects."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port := SystemRandom().randrange(20_000, 32_000)))
            return port
