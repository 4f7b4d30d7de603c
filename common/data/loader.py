"""Batches on the device: tokens cut into sequences, ordered by common/data/order.py, and read ahead so that no step waits."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, TimeoutError
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch

from gptscale.common.data.order import sequence_indices
from gptscale.common.data.sources import Array, SourceSpan, Synthetic, TokenSource
from gptscale.common.engine import Batch
from gptscale.common.errors import DataError

# A read that takes longer means a dead disk, and an error is better than a hang.
WAIT_S_MAX = 120.0


def split(source: Synthetic | Array, *, seq_len: int, eval_fraction: float = 0.05) -> tuple[SourceSpan, SourceSpan]:
    """Return the part to train on and the part to hold out.

    The latter is the last `eval_fraction` of the tokens, at least one sequence. DataError if there are not two sequences.
    """
    n_tokens, needed = len(source), 2 * (seq_len + 1)
    if n_tokens < needed:
        what = f"{n_tokens} tokens, expected at least {needed}: a sequence to train on and one to hold out"
        fix = f"use --seq-len {n_tokens // 2 - 1} or more text" if n_tokens >= 4 else "give more text"
        raise DataError(what, f"in {source.name}", fix)
    held_out = max(seq_len + 1, int(n_tokens * eval_fraction))
    return SourceSpan(source, 0, n_tokens - held_out), SourceSpan(source, n_tokens - held_out, n_tokens)


class Batches:
    """One data rank's share of each global batch of a source, which has a sequence or more.

    Sequence i reads tokens [i T, i T + T] with T = seq_len, one more than it trains on: targets are inputs shifted by one.
    closing_s: how long `close` may take.
    """

    closing_s = 0.0

    def __init__(
        self,
        source: TokenSource,
        *,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        data_rank: int = 0,
        data_size: int = 1,
    ) -> None:
        self.source, self.seq_len, self.global_batch_size, self.seed = source, seq_len, global_batch_size, seed
        self.data_rank, self.data_size = data_rank, data_size
        self.n_sequences = (len(source) - 1) // seq_len

    def sequences(self, step: int, data_rank: int) -> tuple[int, ...]:
        """Return the indices of the sequences that a rank, this one or another, trains on in 0-based `step`."""
        return sequence_indices(
            step,
            seed=self.seed,
            n_sequences=self.n_sequences,
            global_batch_size=self.global_batch_size,
            data_rank=data_rank,
            data_size=self.data_size,
        )

    def bytes_per_token(self, steps: int) -> float | None:
        """Return the mean bytes of text of a target in the first global batches, None for ids whose text is unknown."""
        if (id_bytes := self.source.id_bytes) is None:
            return None
        of_all = (i for step in range(steps) for rank in range(self.data_size) for i in self.sequences(step, rank))
        counts = [id_bytes[self.source.read(i * self.seq_len + 1, self.seq_len)].mean() for i in of_all]
        return float(np.mean(counts)) or None

    def close(self) -> None:
        """Let go of what reads ahead."""

    def batch(self, step: int) -> Batch:
        """Return this rank's share of the global batch of 0-based `step`, CPU int64 (sequences_per_rank, seq_len)."""
        sequences = self.sequences(step, self.data_rank)
        rows = np.stack([self.source.read(i * self.seq_len, self.seq_len + 1) for i in sequences])
        tokens = torch.from_numpy(rows)
        return Batch(step, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), sequences)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to `device` without blocking the host."""
    inputs, targets = (t.to(device, non_blocking=True) for t in (batch.inputs, batch.targets))
    return batch._replace(inputs=inputs, targets=targets)


class Prefetcher:
    """Batches on the device, which one thread reads `depth` steps ahead of the loop.

    It is a context manager. On CUDA the thread also pins the batches, so that the host queues the copy and goes on.
    """

    def __init__(self, batches: Batches, device: torch.device, *, depth: int = 2) -> None:
        self.batches, self.device, self.depth = batches, device, depth
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()
        self._requests: SimpleQueue[tuple[int, Future[Batch]] | None] = SimpleQueue()
        # A daemon, which an executor's threads are not: Python must not wait at exit for a read that hangs.
        self._thread = Thread(target=self._work, name="gptscale-data", daemon=True)
        self._thread.start()

    def get(self, step: int) -> Batch:
        """Return the batch of 0-based `step`, or raise here what went wrong in reading it.

        Steps are asked for in turn. Any other step starts the reading ahead anew. DataError after two minutes without data.
        """
        if not self._ahead or self._ahead[0][0] != step:
            self._forget()
            self._ask(step)
        _, future = self._ahead.popleft()
        try:
            batch = future.result(timeout=WAIT_S_MAX)
        except TimeoutError:
            if future.done():
                # The source's own TimeoutError, not ours.
                raise
            what = f"step {step + 1} waited {WAIT_S_MAX:g} s for its batch"
            raise DataError(what, f"in {self.batches.source.name}", "check the disk it lies on") from None
        batch = to_device(batch, self.device)
        # Ask for the next batches only now: a reader woken earlier would hold Python's lock while this thread waits for it.
        newest = self._ahead[-1][0] if self._ahead else step
        for following in range(newest + 1, step + 1 + self.depth):
            self._ask(following)
        return batch

    def close(self) -> None:
        """Stop reading ahead, without waiting for the read under way."""
        self._forget()
        self._requests.put(None)
        if self.batches.closing_s:
            self._thread.join(self.batches.closing_s)

    def _forget(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _ask(self, step: int) -> None:
        future: Future[Batch] = Future()
        self._ahead.append((step, future))
        self._requests.put((step, future))

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            step, future = request
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._read(step))
            except BaseException as error:
                # get() raises it, where it can be acted on.
                future.set_exception(error)
        self.batches.close()

    def _read(self, step: int) -> Batch:
        batch = self.batches.batch(step)
        if self.device.type != "cuda":
            return batch
        with torch.cuda.device(self.device):
            # A new thread's current device is GPU 0 on every rank.
            return Batch(step, batch.inputs.pin_memory(), batch.targets.pin_memory(), batch.sequences)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
