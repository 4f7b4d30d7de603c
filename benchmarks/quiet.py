"""A bench measures on a machine that nobody else uses, or says that it did not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptscale.common.errors import ConfigError

if TYPE_CHECKING:
    from gptscale.common.measure.contention import MachineClock

# How long the machine is watched before a bench begins. Tests set it to 0, as then nothing is refused.
WATCH_S = 1.1


@dataclass(frozen=True)
class QuietOptions:
    """What every bench that takes times asks of the machine."""

    allow_busy: bool = False
    """Measure although others use the machine. Else a bench refuses to begin, or to count, when they take over 5 percent."""


@contextmanager
def quiet_machine(options: QuietOptions, bench: str) -> Iterator[None]:
    """Refuse to measure on a machine that others use now, and refuse the figures if they used it meanwhile.

    What was printed and written stays. Raises ConfigError, unless the options allow a busy machine.
    """
    if options.allow_busy or not WATCH_S:
        yield
        return
    # After the options are parsed, because it imports torch.
    from gptscale.common.measure.contention import MachineClock

    cpus = len(os.sched_getaffinity(0))
    before = MachineClock(threads=cpus)
    time.sleep(WATCH_S)
    _refuse_taken(before, f"in {bench}", "wait until the machine is quiet, or accept it with --allow-busy")
    during = MachineClock(threads=cpus)
    yield
    _refuse_taken(during, f"while {bench} measured", "measure again, or accept such figures with --allow-busy")


def _refuse_taken(clock: MachineClock, where: str, fix: str) -> None:
    from gptscale.common.measure.limits import TAKEN_MAX

    if (taken := taken_since(clock)) > TAKEN_MAX:
        raise ConfigError(f"other programs took {taken:.0%} of the machine's processors", where, fix)


def taken_since(clock: MachineClock) -> float:
    """Return the share of the processors that programs took since a clock was made, without this process and its children."""
    from gptscale.common.measure.contention import taken_fraction

    return taken_fraction([clock.lap()]) or 0.0
