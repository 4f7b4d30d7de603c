"""From tokens to batches on the device: cut, ordered by common/order.py, and read ahead so that no step waits."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from types import TracebackType

import numpy as np
import torch

from gptscale.common.engine import Batch
from gptscale.common.errors import ConfigError, DataError
from gptscale.common.order import sequence_indices
from gptscale.common.tokens import Span, TokenSource

WAIT_S_MAX = 120.0  # a read that takes longer is a dead disk, and an error beats a hang


def split(source: TokenSource, *, seq_len: int, eval_fraction: float = 0.05) -> tuple[TokenSource, TokenSource]:
    """Training part and held-out part: the last `eval_fraction` of the tokens, at least one sequence.

    DataError if there are not two sequences.
    """
    needed = 2 * (seq_len + 1)
    if len(source) < needed:
        raise DataError(
            f"{len(source)} tokens are fewer than two sequences of {seq_len}",
            "in --data",
            f"use --seq-len {max(1, len(source) // 2 - 1)} or more text",
        )
    held_out = max(seq_len + 1, int(len(source) * eval_fraction))
    cut = len(source) - held_out
    return Span(source, 0, cut), Span(source, cut, len(source))


class Batches:
    """One data rank's share of each global batch of a source.

    Sequence i reads tokens [i T, i T + T], T = seq_len, one more than it trains on: targets are inputs shifted by one.
    """

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
        if self.n_sequences < 1:
            raise DataError(
                f"{len(source)} tokens hold no sequence of {seq_len}", "in --data", "use a smaller --seq-len"
            )
        if global_batch_size % data_size:
            raise ConfigError(
                f"global batch {global_batch_size} is not divisible by {data_size} data ranks",
                "in --global-batch-size",
                f"use {-(-global_batch_size // data_size) * data_size}",
            )

    def sequences(self, step: int, data_rank: int) -> tuple[int, ...]:
        """Which sequences any rank trains on in 0-based `step`."""
        return sequence_indices(
            step,
            seed=self.seed,
            n_sequences=self.n_sequences,
            global_batch_size=self.global_batch_size,
            data_rank=data_rank,
            data_size=self.data_size,
        )

    def batch(self, step: int) -> Batch:
        """This rank's share of the global batch of 0-based `step`, on the CPU."""
        sequences = self.sequences(step, self.data_rank)
        rows = np.stack([self.source.read(i * self.seq_len, self.seq_len + 1) for i in sequences])
        tokens = torch.from_numpy(rows)
        return Batch(step, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), sequences)


class Prefetcher:
    """Batches on the device, read by one thread `depth` steps ahead of the loop; a context manager.

    On CUDA the thread also pins, so that the copy overlaps with the step before.
    """

    def __init__(self, batches: Batches, device: torch.device, *, depth: int = 2) -> None:
        self.batches, self.device, self.depth = batches, device, depth
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gptscale-data")
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()

    def get(self, step: int) -> Batch:
        """The batch of 0-based `step`; errors of the reading thread are raised here."""
        if not self._ahead or self._ahead[0][0] != step:
            self._ahead.clear()  # the first call, or a jump
            self._ask(step)
        _, future = self._ahead.popleft()
        newest = self._ahead[-1][0] if self._ahead else step
        for following in range(newest + 1, step + 1 + self.depth):
            self._ask(following)
        try:
            batch = future.result(timeout=WAIT_S_MAX)
        except TimeoutError:
            raise DataError(
                f"step {step + 1} waited {WAIT_S_MAX:.0f} s for its batch",
                "in the data source",
                "check the disk it lies on",
            ) from None
        return batch.to(self.device)

    def _ask(self, step: int) -> None:
        self._ahead.append((step, self._thread.submit(self._read, step)))

    def _read(self, step: int) -> Batch:
        batch = self.batches.batch(step)
        if self.device.type != "cuda":
            return batch
        return Batch(step, batch.inputs.pin_memory(), batch.targets.pin_memory(), batch.sequences)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
