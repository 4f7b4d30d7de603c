"""The data of the university exercise: a small set of random ids behind torch's DataLoader, with its samplers and workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from gptscale.common.data.loader import Batches
from gptscale.common.data.sources import Synthetic
from gptscale.common.engine import Batch
from gptscale.common.errors import ConfigError
from gptscale.common.model.loss import IGNORE
from gptscale.common.settings.run import Run

# Left by an epoch that is not begun.
NO_STEP = -1


def _begin_worker(worker: int) -> None:
    """Keep a worker silent when its rank was killed while it took a tensor. The other ranks name that rank."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, ConnectionError):
            show(kind, error, trace)

    sys.excepthook = hook


class ExerciseBatches(Batches):
    """One data rank's batches of `n_sequences` random sequences, which the ranks go through again and again in new orders.

    A batch is a pure function of seed and step, so that a run can go on where it was. The targets are those of a loss that shifts
    inside the sequence: the last of each sequence counts nothing.
    """

    closing_s = 10.0

    def __init__(self, run: Run, n_sequences: int, workers: int, data_rank: int, data_size: int) -> None:
        source = Synthetic(run.gpt.vocab_size, run.config.seed, n_sequences * run.seq_len + 1)
        sizes = {"seq_len": run.seq_len, "global_batch_size": run.batch.global_batch_size, "seed": run.config.seed}
        super().__init__(source, **sizes, data_rank=data_rank, data_size=data_size)
        if n_sequences < self.global_batch_size:
            what = f"{n_sequences} sequences are less than a global batch of {self.global_batch_size}"
            raise ConfigError(what, "in --data-size", f"use {self.global_batch_size} or more")
        self.share, self.steps_per_epoch = self.global_batch_size // data_size, n_sequences // self.global_batch_size
        ids = torch.from_numpy(source.read(0, n_sequences * run.seq_len)).view(n_sequences, run.seq_len)
        self.data_set = TensorDataset(ids, torch.arange(n_sequences))
        self.sampler = self._sampler(data_rank)
        self.loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
            self.data_set,
            batch_size=self.share,
            sampler=self.sampler,
            num_workers=workers,
            pin_memory=run.world.device.type == "cuda",
            persistent_workers=workers > 0,
            drop_last=True,
            worker_init_fn=_begin_worker,
            # Without a generator of its own the DataLoader draws from the global one.
            generator=torch.Generator().manual_seed(self.seed),
        )
        self._epoch: Iterator[tuple[Tensor, ...]] = iter(())
        self._next_step = NO_STEP

    def _sampler(self, data_rank: int) -> Any:
        if self.data_size > 1:
            return DistributedSampler(self.data_set, self.data_size, data_rank, seed=self.seed, drop_last=True)
        return RandomSampler(self.data_set, generator=torch.Generator())

    def _begin(self, sampler: Any, epoch: int) -> None:
        """Let a sampler draw the order of 0-based `epoch`."""
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        else:
            sampler.generator.manual_seed(self.seed + epoch)

    def sequences(self, step: int, data_rank: int) -> tuple[int, ...]:
        epoch, place = divmod(step, self.steps_per_epoch)
        sampler = self._sampler(data_rank)
        self._begin(sampler, epoch)
        return tuple(islice(sampler, place * self.share, (place + 1) * self.share))

    def batch(self, step: int) -> Batch:
        """Return this rank's share of the batch of 0-based `step`. Any other step than the next begins its epoch anew."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if step != self._next_step or place == 0:
            self._begin(self.sampler, epoch)
            self._epoch = islice(self.loader, place, None)
        self._next_step = step + 1
        ids, indices = next(self._epoch)
        targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORE)], dim=1)
        return Batch(step, ids, targets, tuple(indices.tolist()))

    def close(self) -> None:
        self._epoch, self._next_step = iter(()), NO_STEP
        # A DataLoader keeps its persistent workers there. They end with it.
        self.loader._iterator = None
