"""A vision run by PyTorch Lightning's Trainer in place of our loop: the same model, batches, rates, tests and files.

`trainer` is the Trainer as it comes: it draws a bar, logs the loss of each step, and saves checkpoints of its own.
`trainer_bare` is the Trainer in its barebones mode, without all of that.
"""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytorch_lightning
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from gptscale.common.engine import Batch
from gptscale.common.engines.torch_engine import tell_backward
from gptscale.common.process.world import agree_any
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.loop import VisionBatches
from gptscale.lenet.run.preflight import ReadyVisionRun
from gptscale.lenet.run.record import VisionRecorder
from gptscale.lenet.run.strategy import local_machine


def train_by_trainer(
    ready: ReadyVisionRun, engine: VisionEngine, data: VisionBatches, recorder: VisionRecorder, *, start: int, steps: int,
    **after_step: Callable[..., Any],
) -> int:  # fmt: skip
    """Do what `common.train.train` does, by the Trainer.

    after_step: its `lr_at`, `evaluate`, `save` and `stop_requested`.
    """
    bare = ready.config.strategy == "trainer_bare"
    module = VisionModule(ready, engine, data, recorder, start, logs=not bare)
    vars(module).update(after_step)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer = pytorch_lightning.Trainer(
        **local_machine(ready.world),
        strategy=DDPStrategy(),
        plugins=[TorchElasticEnvironment()],
        max_epochs=ready.config.epochs - start // ready.batch_order.steps_per_epoch,
        max_steps=steps - start,
        barebones=bare,
        default_root_dir=recorder.folder / "lightning",
        num_sanity_val_steps=0,
        # Our loader shares out the images, anew in each epoch.
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")
        trainer.fit(module)
    return module.step


class EpochBatches:
    """This rank's batches of one epoch, from a step on."""

    def __init__(self, data: VisionBatches, recorder: VisionRecorder, first: int) -> None:
        self.data, self.recorder = data, recorder
        self.steps = range(first, (first // data.per_epoch + 1) * data.per_epoch)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Batch]:
        for step in self.steps:
            with self.recorder.waiting():
                batch = self.data.get(step)
            yield batch


class VisionModule(pytorch_lightning.LightningModule):
    """A vision model as Lightning wants it: its loss, its optimizer, its batches, and what happens after steps.

    lr_at, evaluate, save, stop_requested: as in `common.train.train`. logs: whether Lightning's logger and bar get each loss.
    """

    lr_at: Callable[[int], float]
    evaluate: Callable[[int], None]
    save: Callable[[int, bool], None]
    stop_requested: Callable[[], bool]

    def __init__(
        self,
        ready: ReadyVisionRun, engine: VisionEngine, data: VisionBatches, recorder: VisionRecorder, start: int, *, logs: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.network = engine.module
        self.ready, self.engine, self.data, self.recorder, self.logs = ready, engine, data, recorder, logs
        self.step = start
        self.signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def configure_optimizers(self) -> Optimizer:
        return self.engine.optimizer

    def train_dataloader(self) -> EpochBatches:
        return EpochBatches(self.data, self.recorder, self.step)

    def on_train_start(self) -> None:
        """Take signals as our loop does, which saves within an epoch, and leave buffers alone as recipes/ddp.py does."""
        for number, handler in self.signals.items():
            signal.signal(number, handler)
        cast(Any, self.trainer.strategy.model).broadcast_buffers = False

    def on_train_epoch_start(self) -> None:
        self.recorder.begin_epoch()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.engine.set_rate(self.lr_at(self.step))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.engine.loss(batch)
        if self.logs:
            self.log("train_loss", loss, prog_bar=True)
        return tell_backward(loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Do after the step what our loop does, and stop where it would."""
        lr, result = self.lr_at(self.step), self.engine.result(outputs["loss"])
        self.step += 1
        synchronised = self.recorder.step(self.step, lr, result)
        with self.recorder.paused():
            self.evaluate(self.step)
            stop = synchronised and agree_any(self.stop_requested())
            self.save(self.step, stop or self.step == self.ready.steps)
        if stop:
            self.trainer.should_stop = True
