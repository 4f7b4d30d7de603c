"""Whether the CUDA of this process is a mock, which gives out addresses and computes nothing (foresight/mock_cuda).

Nothing that was computed under it is a loss or a speed. So a run does not start under it, and no row is written, except by
`gptscale simulate`, which reads neither.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from gptscale.common.errors import ConfigError

_simulating = False


@cache
def is_mock() -> bool:
    """Return whether a mock of CUDA is loaded into this process, whatever name its device has."""
    return hasattr(ctypes.CDLL(None), "mock_is_loaded")


def refuse_mock(what: str) -> None:
    """Raise ConfigError if CUDA is a mock and this is no simulation.

    what: what would have been done, as "run".
    """
    if is_mock() and not _simulating:
        where = "in LD_PRELOAD, which loads the mock"
        raise ConfigError(f"CUDA is a mock that computes nothing, so it cannot {what}", where, "use gptscale simulate")


@contextmanager
def simulating() -> Iterator[None]:
    """Let what follows use the mock. Rows stay refused."""
    global _simulating
    _simulating = True
    yield
