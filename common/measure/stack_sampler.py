"""Where the main thread's time goes, from samples of the Python code that it is in.

A profiler that hooks every call makes code of many small calls look slower than it is. Samples do not, and cost some percent.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

INTERVAL_S = 0.001
# A thread that runs Python gives way to the sampler after this time instead of 5 ms, so that such code is not missed.
SWITCH_INTERVAL_S = 1e-4
# A place in the code: the path of its file and the name of its function.
Place = tuple[str, str]


class StackSampler:
    """Counts samples of the thread that enters it by `part_of`, until it leaves.

    part_of: gives the part that a sample belongs to, from the places on the stack, innermost first. None counts nowhere.
    """

    def __init__(self, part_of: Callable[[Sequence[Place]], str | None]) -> None:
        self.part_of = part_of
        self.counts: Counter[str] = Counter()
        self._ended = threading.Event()

    def __enter__(self) -> StackSampler:
        self._before, self._watched = sys.getswitchinterval(), threading.get_ident()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = threading.Thread(target=self._watch, name="stack-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._before)

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            part = self.part_of(places_of_thread(self._watched))
            if part is not None:
                self.counts[part] += 1

    def shares(self) -> dict[str, float]:
        """Return the share of the samples in each part, the largest first."""
        total = self.counts.total()
        return {part: n / total for part, n in self.counts.most_common()}


def places_of_thread(thread: int) -> list[Place]:
    """Return the places of the stack of another thread, innermost first."""
    # Python makes an object of each frame that is read, which may begin a garbage collection. Within it the other thread
    # may go on, and Python 3.11 then reads frames that are gone: it crashes or hangs (python/cpython#106883).
    collects = gc.isenabled()
    gc.disable()
    try:
        return places(sys._current_frames().get(thread))
    finally:
        if collects:
            gc.enable()


def places(frame: FrameType | None) -> list[Place]:
    """Return the places of a stack, innermost first."""
    stack = []
    while frame is not None:
        stack.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return stack
