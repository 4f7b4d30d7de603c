"""TensorBoard events of one run: one point per step and tag, resumed or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gptscale.results.record.files import warn

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter


class Board:
    """Scalars for TensorBoard in `folder`.

    start_step: the step a run resumes from; what an earlier process wrote beyond it is superseded (TensorBoard hides
    it), so that curves go on without a doubled step.
    A disk that fills up ends the events with a warning: they repeat what steps.csv holds, and are not worth a run.
    """

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        # Here, not above: a tenth of a second at the start of every process, of which one needs them.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import FileWriter

        self._Summary = Summary
        self._writer: FileWriter | None = FileWriter(folder)
        self._writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), start_step + 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values, by tag: all in one event, a fifth of the time of `SummaryWriter.add_scalar` for each."""
        if self._writer is None:
            return
        summary = self._Summary(
            value=[self._Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        try:
            self._writer.add_summary(summary, step)
        except OSError as error:  # of the thread that writes
            self._give_up(error)

    def sync(self) -> None:
        """Hand the events to the operating system."""
        try:
            if self._writer is not None:
                self._writer.flush()
        except OSError as error:
            self._give_up(error)

    def close(self, failed: bool = False) -> None:
        """Write what is left and close; events have no word for a run that failed."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        warn(f"TensorBoard events end here ({error}), steps.csv goes on")
