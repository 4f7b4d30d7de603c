"""A vision run by PyTorch Lightning's Trainer in place of our loop: the same model, batches, rates, tests and files.

`trainer` is the Trainer as it comes: it draws a bar, logs the loss of each step, and saves checkpoints of its own.
`trainer_bare` is the Trainer in its barebones mode, without all of that.
"""

from __future__ import annotations

import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytorch_lightning
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from gptscale.common.engines.torch_engine import tell_backward
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.loop import SaveCheckpoint, TestSet, asked_to_stop, end_epoch
from gptscale.lenet.run.preflight import VisionPlan
from gptscale.lenet.run.recorder import StepOnDevice, VisionRecorder
from gptscale.lenet.run.strategy import local_machine


def trainer_epochs(
    plan: VisionPlan,
    engine: VisionEngine,
    recorder: VisionRecorder,
    start: int,
    save_checkpoint: SaveCheckpoint,
    stop_requested: Callable[[], bool],
) -> bool:
    """Do what `train_epochs` does, by the Trainer."""
    bare = plan.config.strategy == "trainer_bare"
    module = VisionModule(plan, engine, recorder, start, save_checkpoint, stop_requested, logs=not bare)
    first_epoch = start // plan.batch_order.steps_per_epoch
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer = pytorch_lightning.Trainer(
        **local_machine(plan.world),
        # This is as in recipes/ddp.py.
        strategy=DDPStrategy(broadcast_buffers=False),
        plugins=[TorchElasticEnvironment()],
        max_epochs=plan.config.epochs - first_epoch,
        max_steps=plan.steps - start,
        barebones=bare,
        default_root_dir=None if recorder.folder is None else recorder.folder / "lightning",
        num_sanity_val_steps=0,
        # Our loader shares out the images, anew in each epoch.
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")
        trainer.fit(module)
    return module.stopped


class EpochBatches:
    """This rank's batches of one epoch from `first_step` on, and the seconds that the last of them was waited for."""

    def __init__(self, plan: VisionPlan, epoch: int, first_step: int) -> None:
        self.batches = plan.loader().epoch(epoch, first_step)
        self.n_batches = plan.batch_order.steps_per_epoch - first_step
        self.load_s = 0.0

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        requested_s = time.perf_counter()
        for batch in self.batches:
            self.load_s = time.perf_counter() - requested_s
            yield batch
            requested_s = time.perf_counter()


class VisionModule(pytorch_lightning.LightningModule):
    """A vision model as Lightning wants it: its loss, its optimizer, its batches, and what happens after steps and epochs.

    logs: whether the loss of each step is given to Lightning's logger and bar. stopped: whether the run was asked to stop early.
    """

    def __init__(
        self,
        plan: VisionPlan,
        engine: VisionEngine,
        recorder: VisionRecorder,
        start: int,
        save_checkpoint: SaveCheckpoint,
        stop_requested: Callable[[], bool],
        *,
        logs: bool,
    ) -> None:
        super().__init__()
        self.network = engine.module
        self.plan, self.engine, self.recorder, self.logs = plan, engine, recorder, logs
        self.save_checkpoint, self.stop_requested = save_checkpoint, stop_requested
        self.test, self.stopped = TestSet(plan), False
        self.step = start
        self.signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    @property
    def epoch(self) -> int:
        """The 0-based epoch that the next step belongs to."""
        return self.step // self.plan.batch_order.steps_per_epoch

    def configure_optimizers(self) -> Optimizer:
        """Return the run's optimizer."""
        return self.engine.optimizer

    def train_dataloader(self) -> EpochBatches:
        """Return the batches of the next epoch."""
        self.batches = EpochBatches(self.plan, self.epoch, self.step % self.plan.batch_order.steps_per_epoch)
        return self.batches

    def on_train_start(self) -> None:
        """Take signals as our loop does, which saves within an epoch. Lightning would end the run without."""
        for number, handler in self.signals.items():
            signal.signal(number, handler)

    def on_train_epoch_start(self) -> None:
        """Start the clock of an epoch."""
        self.recorder.begin_epoch()
        self.ended_s = time.perf_counter()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the rate of the step."""
        self.engine.set_rate(self.plan.lr_at(self.step))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss, of which Lightning computes backward."""
        loss = self.engine.loss(self.step, *batch)
        if self.logs:
            self.log("train_loss", loss, prog_bar=True)
        return tell_backward(loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the step, and stop where our loop would."""
        epoch, lr, load_s = self.epoch, self.plan.lr_at(self.step), self.batches.load_s
        self.step += 1
        ends_epoch = self.step % self.plan.batch_order.steps_per_epoch == 0 or self.step == self.plan.steps
        update_s = time.perf_counter() - self.ended_s - load_s
        taken = StepOnDevice(self.step, epoch + 1, lr, outputs["loss"].detach(), load_s, update_s)
        if asked_to_stop(self.recorder.step(taken, ends_epoch=ends_epoch) and not ends_epoch, self.stop_requested):
            self.save_checkpoint(self.step, None)
            self.stopped = self.trainer.should_stop = True
        self.ended_s = time.perf_counter()

    def on_train_epoch_end(self) -> None:
        """Test, record and save as our loop does."""
        if not self.stopped:
            ended = (self.plan, self.engine, self.recorder, self.test, self.save_checkpoint, self.stop_requested)
            self.stopped = end_epoch(*ended, (self.step - 1) // self.plan.batch_order.steps_per_epoch, self.step)
            self.trainer.should_stop = self.stopped
