"""TensorBoard events of one run: one point per step and tag, resumed or not."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptscale.results.record.files import open_private, warn


class Board:
    """Scalars for TensorBoard in `folder`.

    start_step: the step a run resumes from. TensorBoard then hides what an earlier process wrote beyond it, so that curves go
    on without a doubled step.
    A disk that fills up ends the events with a warning. They repeat what steps.csv holds, and are not worth a run.
    """

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        # Here, because one process of a run needs it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._Event, self._Summary = Event, Summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file: Any = None
        try:
            self._file = RecordWriter(os.fdopen(open_private(folder / name), "ab"))
        except OSError as error:
            self._give_up(error)
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(session_log=SessionLog(status=SessionLog.START), step=start_step + 1))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values by tag, all in one event, a fifth of the time of `SummaryWriter.add_scalar` for each."""
        points = [self._Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(self._Event(summary=self._Summary(value=points), step=step))

    def close(self, failed: bool = False) -> None:
        """Close the file, in the same way whether the run failed or not, because events cannot say that."""
        if self._file is not None:
            # A full disk has been reported before.
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _write(self, event: Any) -> None:
        if self._file is None:
            return
        event.wall_time = time.time()
        try:
            self._file.write(event.SerializeToString())
            self._file.flush()
        except OSError as error:
            self.close()
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        warn(f"TensorBoard events end here ({error}), steps.csv goes on")
