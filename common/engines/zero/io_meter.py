"""Counts what goes through DeepSpeed's asynchronous file I/O, and how long the training waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass
class Traffic:
    """Bytes and seconds of this process so far.

    read_s, write_s: from a request's start to the return of the wait that covers it. waited_s: blocked meanwhile.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    waited_s: float = 0.0


TRAFFIC = Traffic()  # one per process: DeepSpeed makes its handles where it likes


class MeteredIO:
    """DeepSpeed's async_io module, but for `aio_handle`, whose handles are metered."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def aio_handle(self, *args: Any, **kwargs: Any) -> MeteredHandle:
        """A handle as the module makes it, metered."""
        return MeteredHandle(self._module.aio_handle(*args, **kwargs), TRAFFIC)


class MeteredHandle:
    """A DeepSpeed aio_handle that counts; everything is passed on as it is."""

    def __init__(self, handle: Any, traffic: Traffic, clock: Callable[[], float] = time.perf_counter) -> None:
        self._handle, self._traffic, self._clock = handle, traffic, clock
        self._began: dict[str, float] = {}  # of the oldest request under way, by direction

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._handle, name)
        direction = "read" if name.endswith("pread") else "write" if name.endswith("pwrite") else None
        if direction is None:
            return inner

        def counted(buffer: Any, *args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            self._began.setdefault(direction, began)
            if direction == "read":
                self._traffic.read_bytes += buffer.nbytes
            else:
                self._traffic.written_bytes += buffer.nbytes
            result = inner(buffer, *args, **kwargs)
            if name.startswith("sync_"):
                self._finished(began)
            return result

        return counted

    def wait(self) -> Any:
        """Blocks until all requests are done."""
        began = self._clock()
        result = self._handle.wait()
        self._finished(began)
        return result

    def _finished(self, waiting_since: float) -> None:
        now = self._clock()
        self._traffic.waited_s += now - waiting_since
        if (began := self._began.pop("read", None)) is not None:
            self._traffic.read_s += now - began
        if (began := self._began.pop("write", None)) is not None:
            self._traffic.write_s += now - began
