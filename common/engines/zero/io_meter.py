"""A meter of DeepSpeed's asynchronous file I/O: the bytes that go through it, and how long the training waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gptscale.common.process.progress import progress


@dataclass
class Traffic:
    """Bytes and seconds of this process so far.

    read_s, write_s: the time from the start of a request to the return of the wait that covers it.
    waited_s: the time that the process was blocked.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    waited_s: float = 0.0


# One for the whole process, because DeepSpeed makes handles in many places.
TRAFFIC = Traffic()


class MeteredIO:
    """DeepSpeed's async_io module, except that the handles of its `aio_handle` are metered."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def aio_handle(self, *args: Any, **kwargs: Any) -> MeteredHandle:
        return MeteredHandle(self._module.aio_handle(*args, **kwargs), TRAFFIC)


class MeteredHandle:
    """A DeepSpeed aio_handle that counts its traffic and passes every call on unchanged."""

    def __init__(self, handle: Any, traffic: Traffic, clock: Callable[[], float] = time.perf_counter) -> None:
        self._handle, self._traffic, self._clock = handle, traffic, clock
        # When the oldest request under way began, by direction.
        self._began: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._handle, name)
        if not name.endswith(("pread", "pwrite")):
            return inner
        direction = "read" if name.endswith("pread") else "write"

        def counted(buffer: Any, *args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            self._began.setdefault(direction, began)
            if direction == "read":
                self._traffic.read_bytes += buffer.nbytes
            else:
                self._traffic.written_bytes += buffer.nbytes
            if not name.startswith("sync_"):
                return inner(buffer, *args, **kwargs)
            with progress.inside("disk"):
                result = inner(buffer, *args, **kwargs)
            self._finished(began)
            return result

        return counted

    def wait(self) -> Any:
        began = self._clock()
        with progress.inside("disk"):
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
