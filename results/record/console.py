"""What rank 0 prints while a run goes on: a line per step, and on a terminal a progress bar below the lines."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from gptscale.common.measure.speed import Figures

if TYPE_CHECKING:
    from rich.progress import Progress


# Steps from one line to the next where output is no terminal. steps.csv has every step.
LOG_EVERY = 10


class Bar:
    """A progress bar on a terminal, with lines above it. In a log file there are only the lines."""

    def __init__(self, name: str, steps: int) -> None:
        self._progress = _progress_on_a_terminal()
        if self._progress:
            self._task = self._progress.add_task(name, total=steps)
            self._progress.start()

    def step(self, step: int) -> None:
        if self._progress:
            self._progress.update(self._task, completed=step)

    def say(self, line: str) -> None:
        """Print one line, above the bar if there is one."""
        if self._progress:
            self._progress.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)

    def close(self) -> None:
        if self._progress:
            self._progress.stop()


class StepLines(Bar):
    """The bar of a GPT's training, with a line above it for each step: its speed and the time that is left.

    In a log file there is a line for the first step, the last, and every LOG_EVERY-th between.
    second_step: the speed if a step took one second. All rates are that speed over the step's time.
    """

    def __init__(self, name: str, steps: int, tokens_per_step: int, second_step: Figures) -> None:
        super().__init__(name, steps)
        self._steps, self._tokens_per_step = steps, tokens_per_step
        fp8 = "fp8_tflops_per_device" in second_step
        self._kind, self._share = ("fp8 ", "mixed peak") if fp8 else ("", "MFU")
        self._tflops = second_step["fp8_tflops_per_device" if fp8 else "tflops_per_device"] or 0.0
        self._utilisation = second_step["fp8_mixed_utilisation" if fp8 else "mfu"]
        self._has_said = False

    def say_step(self, step: int, loss: float, step_time_s: float, peak_gib: float) -> None:
        """Print how a step went, and when the last will be done."""
        if self._has_said and not self._progress and step % LOG_EVERY and step != self._steps:
            return
        self._has_said = True
        left_s = int((self._steps - step) * step_time_s)
        share = "-" if self._utilisation is None else f"{self._utilisation / step_time_s:.1%}"
        self.say(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.4f}  {step_time_s * 1e3:,.1f} ms  "
            f"{self._tokens_per_step / step_time_s:,.0f} tok/s  {peak_gib:.2f} GiB  "
            f"{self._kind}{self._tflops / step_time_s:.3f} TFLOP/s  {self._share} {share}  "
            f"ETA {left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d}"
        )
        self.step(step)


def _progress_on_a_terminal() -> Progress | None:
    """Return rich's bar, not yet started, or None where standard output is no terminal, as in a log file."""
    # rich takes a twentieth of a second to import, which a run without a terminal need not spend.
    # Its own answer counts where there may be a terminal, because it obeys NO_COLOR, FORCE_COLOR and TTY_COMPATIBLE.
    if not (sys.stdout.isatty() or "FORCE_COLOR" in os.environ or "TTY_COMPATIBLE" in os.environ):
        return None
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, transient=True, refresh_per_second=4)
    return progress if progress.console.is_terminal else None
