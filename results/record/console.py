"""What rank 0 says while a run goes on: a line per step, and on a terminal a progress bar below them."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gptscale.common.measure.speed import Speed


class Console:
    """Lines on standard output.

    second_step: the speed if a step took one second; all rates are that over the step's time.
    """

    def __init__(self, name: str, steps: int, tokens_per_step: int, second_step: Speed) -> None:
        self._steps, self._tokens_per_step = steps, tokens_per_step
        fp8 = second_step.fp8_tflops_per_device is not None
        self._kind, self._share = ("fp8 ", "mixed peak") if fp8 else ("", "MFU")
        self._tflops = second_step.fp8_tflops_per_device or second_step.tflops_per_device or 0.0
        self._utilisation = second_step.fp8_mixed_utilisation if fp8 else second_step.mfu
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, transient=True, refresh_per_second=4)
        self._task = self._bar.add_task(name, total=steps)
        self._has_bar = self._bar.console.is_terminal  # in a log file a bar is noise
        if self._has_bar:
            self._bar.start()

    def step(self, step: int, loss: float, step_time_s: float, peak_gib: float) -> None:
        """Say how a step went, and when the last will be done."""
        left_s = int((self._steps - step) * step_time_s)
        share = "-" if self._utilisation is None else f"{self._utilisation / step_time_s:.1%}"
        self.say(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.4f}  {step_time_s * 1e3:,.1f} ms  "
            f"{self._tokens_per_step / step_time_s:,.0f} tok/s  {peak_gib:.2f} GiB  "
            f"{self._kind}{self._tflops / step_time_s:.3f} TFLOP/s  {self._share} {share}  "
            f"ETA {left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d}"
        )
        if self._has_bar:
            self._bar.update(self._task, completed=step)

    def say(self, line: str) -> None:
        """One line, above the bar if there is one."""
        if self._has_bar:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._has_bar:
            self._bar.stop()
