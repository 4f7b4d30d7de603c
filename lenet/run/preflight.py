"""The checks of a vision run before it starts, without a process group, a model or a new file."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from gptscale.common.checkpoint.reader import Reader, newest_readable
from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import supports_bf16
from gptscale.common.model.precision import check_precision
from gptscale.common.process.world import World
from gptscale.launchers.run.preflight import check_fixed
from gptscale.lenet.data.loader import BatchOrder, FastLoader, Normalise, PilLoader, pil_transform
from gptscale.lenet.data.sources import VisionData, open_data
from gptscale.lenet.models import SIDES, SMALL_SIDES, ImageShape
from gptscale.lenet.run.columns import LENET
from gptscale.lenet.run.config import NOT_WORK, VisionConfig, rate
from gptscale.lenet.run.engine import memory_format, weight_dtype
from gptscale.lenet.run.strategy import backend_of, check_strategy
from gptscale.results.record.run_folder import check_results_folder, checkpoints_in, resume_folder

# Options that must be the same in a run and in its continuation, whose epochs and learning rates may differ.
FIXED = (
    "model operators gelu batch_norm augment loader batch_size optimizer precision amp loss_scale seed data_fingerprint"
).split()


@dataclass(frozen=True)
class ReadyVisionRun:
    """A vision run that has passed all checks, with its options resolved and its images in memory."""

    recipe: ClassVar[str] = "lenet"
    config: VisionConfig
    world: World
    data: VisionData
    batch_order: BatchOrder
    resume: Path | None

    @property
    def run(self) -> Any:
        """The run itself, which has what core asks of a checked run of the GPT, and of its `run`."""
        return self

    @property
    def shape(self) -> ImageShape:
        return ImageShape(self.data.channels, self.data.side, len(self.data.classes))

    @property
    def planned_steps(self) -> int:
        """The number of steps of all epochs, for which the learning rate is planned."""
        return self.config.epochs * self.batch_order.steps_per_epoch

    @property
    def steps(self) -> int:
        """The number of steps that are taken."""
        return min(self.planned_steps, self.config.max_steps or self.planned_steps)

    @property
    def work(self) -> dict[str, Any]:
        """The options that decide what is computed, with the data's fingerprint in place of its name."""
        options = {name: value for name, value in vars(self.config).items() if name not in NOT_WORK}
        return options | {"loss_scale": self.config.resolved_loss_scale, "data_fingerprint": self.data.fingerprint}

    def ends_epoch(self, step: int) -> bool:
        """Return whether 1-based `step` is the last of an epoch, or of the run."""
        return step % self.batch_order.steps_per_epoch == 0 or step == self.steps

    def lr_at(self, step: int) -> float:
        """Return the learning rate of 0-based `step`."""
        return rate(self.config.lr_schedule, step, peak=self.config.lr, total_steps=self.planned_steps)

    def check_same_work(self, reader: Reader) -> None:
        """Raise CheckpointError unless the saved run is an earlier part of this one, ConfigError if all its steps are saved."""
        check_fixed(reader.path, reader.manifest["workload"], self.work, FIXED)
        if reader.step >= self.steps:
            what = f"step {reader.step} is saved already"
            raise ConfigError(what, "in --epochs", f"train more than {reader.step} steps")

    def normalise(self) -> Normalise:
        """Return the function that makes the model's input of uint8 images."""
        return Normalise(self.world.device, weight_dtype(self.config), memory_format(self.config))

    def loader(self) -> FastLoader | PilLoader:
        """Return the loader of this rank's training batches."""
        given = self.data.train, self.batch_order, self.normalise(), self.config.augment
        return FastLoader(*given) if self.config.loader == "fast" else PilLoader(*given, self.config.num_workers)


def ready_run(config: VisionConfig, world: World) -> ReadyVisionRun:
    """Check a run and resolve it.

    Every GptscaleError that a user can prevent is raised here.
    """
    check_vision_precision(config, world.device)
    check_strategy(config, world)
    backend_of(config, world)
    check_results_folder(config.out, config.run_name, LENET, resumes=config.resume is not None)
    # The transforms need torchvision.
    if config.loader == "dataloader":
        pil_transform(config.augment, SIDES[0])
    data = open_data(config.data, root=config.data_dir, image_size=config.image_size, download=config.download)
    if data.side not in (*SMALL_SIDES.get(config.model, ()), *SIDES):
        raise ConfigError(f"{data.name} has images of {data.side} pixels", "in --data", "add --image-size 32")
    batch_order = BatchOrder(len(data.train), config.batch_size, config.seed, world.rank, world.world_size)
    check_shared_memory(config, batch_order, data)
    folder = resume_folder(config.out, config.run_name, config.resume)
    resume = None if folder is None else checkpoints_in(folder, "--save-every N")
    ready = ReadyVisionRun(config, world, data, batch_order, resume)
    if ready.resume is not None and world.is_main:
        if (ready.resume / "manifest.json").exists():
            ready.check_same_work(Reader(ready.resume).verify())
        elif (newest := newest_readable(ready.resume)) is not None:
            # Its bytes are verified when it is loaded, and an older one may take its place, of the same run.
            check_fixed(newest.path, newest.manifest["workload"], ready.work, FIXED)
    return ready


def check_shared_memory(config: VisionConfig, batch_order: BatchOrder, data: VisionData) -> None:
    """Raise ConfigError unless the batches of data workers fit the shared memory, where a full one kills the worker."""
    if not config.num_workers:
        return
    # Each worker has two batches of fp32 images and int64 labels ready, and one in the making.
    batch_bytes = batch_order.share * (4 * data.channels * data.side**2 + 8)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", batch_order.world_size))
    needed, folder = 3 * config.num_workers * ranks * batch_bytes, Path("/dev/shm")
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    if free < needed:
        what = f"{folder} has {free:,} bytes free, {needed:,} are needed by {ranks * config.num_workers} data workers"
        fix = "use --num-workers 0, or give the container more (--shm-size=1g)"
        raise ConfigError(what, "in --num-workers", fix)


def world_from_environment(config: VisionConfig) -> World:
    """Return the world of a vision run in this process, from what the launcher set in the environment."""
    return World.from_environment(config.device, config.dist_timeout_s)


def check_vision_precision(config: VisionConfig, device: torch.device) -> None:
    """Raise ConfigError for a precision for which the device has no fast or no correct arithmetic."""
    if config.precision == "tf32":
        # tf32 came with Ampere, as bf16 did.
        if device.type != "cuda" or not supports_bf16(torch.cuda.get_device_capability(device)):
            raise ConfigError("tf32 needs a GPU of Ampere (8.0) or newer", "in --precision", "use fp32")
        return
    # A CPU can compute these models in fp16, but not the GPT's attention and loss.
    if device.type == "cuda":
        check_precision(config.precision, device)
