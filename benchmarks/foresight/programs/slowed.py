"""One rank of a run that slows itself down as benchmarks/foresight/verdicts.py asks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch.distributed import Work, _functional_collectives

from gptscale.common.data.loader import Batches
from gptscale.common.engines.zero.io_meter import MeteredHandle
from gptscale.launchers.run.worker import run_recipe

MODULE = "benchmarks.foresight.programs.slowed"


def delayed(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return a function that does the same and takes `seconds` longer."""

    @wraps(call)
    def slow(*arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        time.sleep(seconds)
        return result

    return slow


class SlowHandle:
    """A handle of DeepSpeed's file I/O whose waits take `seconds` longer."""

    def __init__(self, handle: Any, seconds: float) -> None:
        self._handle, self.wait = handle, delayed(handle.wait, seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def slow_down(how: Mapping[str, float]) -> None:
    """Slow this rank down: its reader, its exchanges, its files, or all of it on one processor.

    how: seconds for each batch, exchange or wait for files, or whether it is pinned to the processor of its number.
    """
    if seconds := how.get("read_s"):
        setattr(Batches, "batch", delayed(Batches.batch, seconds))  # noqa: B010
    if seconds := how.get("link_s"):
        setattr(Work, "wait", delayed(Work.wait, seconds))  # noqa: B010
        waits: Any = _functional_collectives
        waits.wait_tensor = delayed(waits.wait_tensor, seconds)
    if seconds := how.get("disk_s"):
        metered: Any = MeteredHandle.__init__

        def begin(self: Any, handle: Any, *others: Any, **options: Any) -> None:
            metered(self, SlowHandle(handle, seconds), *others, **options)

        setattr(MeteredHandle, "__init__", begin)  # noqa: B010
    if how.get("pinned"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[int(os.environ["LOCAL_RANK"]) % len(cpus)]})


if __name__ == "__main__":
    recipe, words, how = json.loads(sys.argv[1])
    slow_down(how)
    run_recipe(recipe, words)
