"""A run's progress on standard output: a bar where somebody watches, lines everywhere."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """A progress bar on a terminal, and lines above it; in a log file only the lines."""

    def __init__(self, name: str, steps: int, quiet: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, transient=True, refresh_per_second=4)
        self._task, self._quiet = self._bar.add_task(name, total=steps), quiet
        self._shown = self._bar.console.is_terminal and not quiet
        if self._shown:
            self._bar.start()

    def step(self, step: int) -> None:
        if self._shown:
            self._bar.update(self._task, completed=step)

    def say(self, line: str) -> None:
        if self._shown:
            self._bar.console.print(line, highlight=False, markup=False)
        elif not self._quiet:
            print(line, flush=True)

    def close(self) -> None:
        if self._shown:
            self._bar.stop()
