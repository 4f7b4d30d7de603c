"""TensorBoard events of one run: one point per step and tag, resumed or not."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptscale.results.record.files import open_private, warn

# The polynomial of CRC-32C, bits reversed (RFC 3720, appendix B.4).
CRC32C = 0x82F63B78


class Board:
    """Scalars for TensorBoard in `folder`.

    start_step: the step a run resumes from. TensorBoard then hides what an earlier process wrote beyond it, so that curves go
    on without a doubled step.
    A disk that fills up ends the events with a warning. They repeat what steps.csv holds, and are not worth a run.
    """

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        # Here, because one process of a run needs it. TensorBoard's own writer would import ten times as much.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._Event, self._Summary = Event, Summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file: Any = None
        try:
            self._file = os.fdopen(open_private(folder / name), "ab", buffering=0)
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
            self._file.close()
            self._file = None

    def _write(self, event: Any) -> None:
        """Append one record: its length, the length's check sum, the event, the event's check sum (the TFRecord format)."""
        if self._file is None:
            return
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = length + masked_crc32c(length) + data + masked_crc32c(data)
        try:
            if self._file.write(record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.close()
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        warn(f"TensorBoard events end here ({error}), steps.csv goes on")


def masked_crc32c(data: bytes) -> bytes:
    """Return the check sum of a TFRecord: the CRC-32C of `data`, rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    rotated = (crc >> 15) | (crc << 17)
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (CRC32C if byte & 1 else 0)
    return byte


CRC_TABLE = [_crc_of_byte(byte) for byte in range(256)]
