"""What the one training loop gets from a vision run: its batches, and the test after each epoch that is due."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from gptscale.common.engine import Batch
from gptscale.lenet.data.loader import rank_part
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import ReadyVisionRun
from gptscale.lenet.run.record import VisionRecorder

EVAL_BATCH_SIZE = 1000


class VisionBatches:
    """This rank's batches of training images, epoch after epoch, from any step on."""

    def __init__(self, ready: ReadyVisionRun) -> None:
        self.loader, self.per_epoch = ready.loader(), ready.batch_order.steps_per_epoch
        self._next: int | None = None

    def get(self, step: int) -> Batch:
        """Return the batch of 0-based `step`."""
        epoch, place = divmod(step, self.per_epoch)
        if place == 0 or step != self._next:
            self._epoch = self.loader.epoch(epoch, place)
        self._next = step + 1
        images, labels = next(self._epoch)
        return Batch(step, images, labels)


class EpochEnd:
    """The end of an epoch: a test if it is due, and the epoch's row."""

    def __init__(self, ready: ReadyVisionRun, engine: VisionEngine, recorder: VisionRecorder) -> None:
        self.ready, self.engine, self.recorder, self.test = ready, engine, recorder, TestSet(ready)

    def __call__(self, step: int) -> None:
        """Test and record after 1-based `step`, if it ends an epoch."""
        if not self.ready.ends_epoch(step):
            return
        epoch, began_s, score = -(-step // self.ready.batch_order.steps_per_epoch), time.perf_counter(), None
        if epoch % self.ready.config.eval_every == 0 or step == self.ready.steps:
            self.engine.settle()
            score = self.engine.evaluate(self.test.batches())
        self.recorder.end_epoch(epoch, step, score, time.perf_counter() - began_s)


class TestSet:
    """This rank's part of the test images, on the device: the parts of all ranks together hold each image once."""

    def __init__(self, ready: ReadyVisionRun) -> None:
        test, device = ready.data.test, ready.world.device
        part = rank_part(len(test), ready.world.rank, ready.world.world_size)
        self.normalise = ready.normalise()
        self.images, self.labels = test.images[part].to(device), test.labels[part].to(device)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised images and their labels, EVAL_BATCH_SIZE at a time."""
        for images, labels in zip(self.images.split(EVAL_BATCH_SIZE), self.labels.split(EVAL_BATCH_SIZE), strict=True):
            yield self.normalise(images), labels
