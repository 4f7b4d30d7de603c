"""One run of `gptscale bench verdict`: its launcher, and its ranks, which slow themselves down as the case asks.

Nothing of this is in a run of a user: only this module, which no other starts, changes anything.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from gptscale.common.process.program import Program
from gptscale.common.process.ranks import launch
from gptscale.common.process.warm_parent import begin_warm_parent

MODULE = "gptscale.launchers.bench.verdict.worker"


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


def inject(injected: dict[str, Any]) -> None:
    """Slow this rank down: its reader, its exchanges or its disk. Or pin it to the processor of its number."""
    from torch.distributed import Work, _functional_collectives

    from gptscale.common.data.loader import Batches
    from gptscale.common.engines.zero.io_meter import MeteredHandle

    if seconds := injected.get("read_s"):
        Batches.batch = delayed(Batches.batch, seconds)  # type: ignore[method-assign]
    if seconds := injected.get("link_s"):
        Work.wait = delayed(Work.wait, seconds)  # type: ignore[method-assign]
        _functional_collectives.wait_tensor = delayed(_functional_collectives.wait_tensor, seconds)
    if seconds := injected.get("disk_s"):
        metered = MeteredHandle.__init__
        MeteredHandle.__init__ = lambda self, handle, *a, **o: metered(self, SlowHandle(handle, seconds), *a, **o)  # type: ignore
    if injected.get("pinned"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[int(os.environ["LOCAL_RANK"]) % len(cpus)]})


def main(role: str, task: str) -> None:
    """Launch the ranks of a task in JSON, or be one of them."""
    recipe, options, injected, nproc, environment = json.loads(task)
    if role == "launch":
        os.environ.pop("OMP_NUM_THREADS", None)
        # Forked from the bench's warm parent, it has all imports already, and hands them on to its ranks.
        begin_warm_parent("cpu", imports=[])
        sys.exit(launch(Program(MODULE, ("rank", task)), nproc, environment=environment))
    inject(injected)
    from gptscale.launchers.run.worker import run_recipe

    run_recipe(recipe, options)


if __name__ == "__main__":
    main(*sys.argv[1:])
