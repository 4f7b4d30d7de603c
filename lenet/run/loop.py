"""The training loop of a vision run, with a test after each epoch that is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch import Tensor

from gptscale.common.process.world import agree_any
from gptscale.lenet.data.loader import rank_part
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import VisionPlan
from gptscale.lenet.run.recorder import StepOnDevice, VisionRecorder

EVAL_BATCH_SIZE = 1000
SaveCheckpoint = Callable[[int, int | None], None]


def train_epochs(
    plan: VisionPlan,
    engine: VisionEngine,
    recorder: VisionRecorder,
    start: int,
    save_checkpoint: SaveCheckpoint,
    stop_requested: Callable[[], bool] = lambda: False,
) -> bool:
    """Take the optimizer steps after step `start`, test between epochs, and return whether the run was asked to stop early.

    save_checkpoint(step, complete_epochs) is called after every epoch, and with None for the epochs before a requested stop.
    """
    config, per_epoch = plan.config, plan.batch_order.steps_per_epoch
    loader, test = plan.loader(), TestSet(plan)
    for epoch in range(start // per_epoch, config.epochs):
        recorder.begin_epoch()
        first_step = start % per_epoch if epoch == start // per_epoch else 0
        step, requested_s = epoch * per_epoch + first_step, time.perf_counter()
        for images, labels in loader.epoch(epoch, first_step):
            loaded_s, lr = time.perf_counter(), plan.lr_at(step)
            loss = engine.train_step(step, images, labels, lr)
            step, now = step + 1, time.perf_counter()
            ends_epoch = step % per_epoch == 0 or step == plan.steps
            times = {"load_s": loaded_s - requested_s, "update_s": now - loaded_s}
            taken = StepOnDevice(step, epoch + 1, lr, loss, **times, skipped=engine.skipped)
            if asked_to_stop(recorder.step(taken, ends_epoch=ends_epoch) and not ends_epoch, stop_requested):
                save_checkpoint(step, None)
                return True
            requested_s = time.perf_counter()
            if step == plan.steps:
                break
        stop = end_epoch(plan, engine, recorder, test, save_checkpoint, stop_requested, epoch, step)
        if stop or step == plan.steps:
            return stop
    return False


def asked_to_stop(may_ask: bool, stop_requested: Callable[[], bool]) -> bool:
    """Return whether any rank was asked to stop, if all may ask: they have just waited for the device, within an epoch."""
    return may_ask and agree_any(stop_requested())


def end_epoch(
    plan: VisionPlan,
    engine: VisionEngine,
    recorder: VisionRecorder,
    test: TestSet,
    save_checkpoint: SaveCheckpoint,
    stop_requested: Callable[[], bool],
    epoch: int,
    step: int,
) -> bool:
    """Test if it is due, record 0-based `epoch`, which `step` ended, save, and return whether the run was asked to stop early."""
    score, began_s = None, time.perf_counter()
    if (epoch + 1) % plan.config.eval_every == 0 or step == plan.steps:
        engine.settle()
        score = engine.evaluate(test.batches())
    recorder.end_epoch(epoch + 1, step, score, time.perf_counter() - began_s)
    stop = step < plan.steps and agree_any(stop_requested())
    save_checkpoint(step, None if stop else epoch + 1)
    return stop


class TestSet:
    """This rank's part of the test images, on the device: the parts of all ranks together hold each image once."""

    def __init__(self, plan: VisionPlan) -> None:
        test, device = plan.data.test, plan.world.device
        part = rank_part(len(test), plan.world.rank, plan.world.world_size)
        self.normalise = plan.normalise()
        self.images, self.labels = test.images[part].to(device), test.labels[part].to(device)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised images and their labels, EVAL_BATCH_SIZE at a time."""
        for images, labels in zip(self.images.split(EVAL_BATCH_SIZE), self.labels.split(EVAL_BATCH_SIZE), strict=True):
            yield self.normalise(images), labels
