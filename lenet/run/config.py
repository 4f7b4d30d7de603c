"""The options of a vision run, which every study shares and which are validated once."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import OptionNeed, check_name, check_ranges, check_run_name
from gptscale.common.settings.command_line import changed_options
from gptscale.common.settings.learning_rate import learning_rate
from gptscale.lenet.data import Augmentation
from gptscale.lenet.models import MODEL_NAMES, WITH_BATCH_NORM, WITHOUT_CUSTOM_OPERATORS, Gelu, check_side
from gptscale.results.record.wandb_board import check_wandb

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
MAX_LOSS_SCALE = 2.0**24
# Strategies whose processes exchange gradients, also if there is only one, and those that have a loop of their own.
OF_PROCESSES = ("ddp", "fabric", "trainer", "trainer_bare")
BY_TRAINER = ("trainer", "trainer_bare")
# Where the images are kept, which show in the fingerprint of the data, and how a run computes its work, looks at itself and
# writes. Any other option makes the work of two runs unequal.
NOT_WORK = frozenset(
    "data data_dir download image_size num_workers strategy device backend dist_timeout_s eval_every log_every save_every "
    "keep_checkpoints resume out run_name tensorboard verdict wandb study variant".split()
)
# Imports of each process of a run, whatever its strategy: the worker, and what parses its options.
RUN_IMPORTS = ("gptscale.lenet.run.worker", "tyro")
# Every command that trains on images has it.
TORCHVISION_NEED = OptionNeed(
    "data_dir,download",
    lambda c: c.data in ("mnist", "cifar10"),
    "{data} is no data set of torchvision",
    "use --data mnist",
)


@dataclass(frozen=True)
class VisionConfig:
    """The options of a vision run: what it trains, on which images, for how long, and what it writes.

    Raises ConfigError for values out of range and for options that do not go together.
    """

    model: str = "lenet"
    """lenet | lenet_classic | pure_linear | simple_conv | cnn | conv2_shared | conv2_independent | conv10_shared |
    conv10_independent | vgg11 | vgg13 | vgg16 | vgg19 | vgg19_quarter (a quarter of its channels) | resnet18."""
    operators: Literal["torch", "custom"] = "torch"
    """torch | custom: max pooling, and convolution + bias + ReLU of lenet and the conv* nets, by gptscale.ops."""
    gelu: Gelu | None = None
    """GELU instead of the model's own activation (ReLU; scaled tanh in lenet_classic): erf | tanh | sigmoid by torch,
    custom-erf | custom-tanh | custom-sigmoid by this package's operators, python-* by the same in Python."""
    batch_norm: Literal["local", "sync"] = "local"
    """Statistics of each rank's share, or of the global batch. Without batch norm there is no difference."""

    data: str = "digits"
    """digits (scikit-learn's, no download) | mnist | cifar10 | a folder of idx files, or of train/CLASS/* and test/CLASS/*."""
    data_dir: Path = Path("data")
    """Where torchvision keeps mnist and cifar10."""
    download: bool = False
    """Download mnist or cifar10 to --data-dir if it is not there."""
    image_size: int | None = None
    """Side that images are resampled to: 28 or 32, with resnet18 also 16. Default theirs, 28 for digits, 32 for folders."""
    augment: Augmentation = "affine"
    """none | affine (RandomAffine(15, .1, .8-1.2)) | mild (RandomAffine(8, .06, .92-1.08)) | flip (random crop and mirror) |
    jitter (flip, rotation and colour)."""
    loader: Literal["fast", "dataloader"] = "fast"
    """fast (all images on the device, augmented in batches) | dataloader (torch's, with PIL transforms)."""
    num_workers: int = 0
    """Worker processes of --loader dataloader; the fast loader has none."""

    epochs: int = 10
    """Walks through the training images."""
    max_steps: int | None = None
    """Ends the run after that many optimizer steps, though the learning rate is planned for all epochs."""
    batch_size: int = 32
    """Images per optimizer step over all ranks."""
    seed: int = 1234
    """Fixes weights, order, augmentation and dropout."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """adam | adamw | sgd, torch's own."""
    lr: float = 1e-3
    """Peak learning rate."""
    lr_schedule: Schedule = "constant"
    """constant | cosine (to nothing) | onecycle (torch's OneCycleLR, without its cycle of momentum)."""
    weight_decay: float = 0.0
    """Of all parameters."""
    momentum: float = 0.9
    """Of sgd."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""

    strategy: Literal["auto", "single", "ddp", "dataparallel", "fabric", "trainer", "trainer_bare"] = "auto"
    """auto (ddp with several processes, else single) | single | ddp | dataparallel (one process, two or more GPUs) | fabric
    (ddp by Lightning Fabric) | trainer (ddp by Lightning's Trainer, as it comes) | trainer_bare (without its bar, logger and
    checkpoints)."""
    precision: Precision = "fp32"
    """fp32 | tf32 (CUDA, Ampere) | bf16 | fp16."""
    amp: bool = True
    """With bf16 and fp16: autocast, weights in fp32. --no-amp casts weights and images instead."""
    loss_scale: str | None = None
    """What the loss of fp16 is multiplied with: dynamic (default with autocast) | none (default without) | a number. bf16 has the
    range of fp32 and needs none."""
    channels_last: bool = True
    """Pixels of all channels beside each other in memory, which is faster for convolutions."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when it is there."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What several processes exchange gradients by: auto takes nccl for CUDA, else gloo."""
    dist_timeout_s: float | None = None
    """Longest wait for another rank in seconds; default 120 on CPU, 600 on GPU."""

    eval_every: int = 1
    """Epochs between tests; the last epoch is always tested."""
    log_every: int = 50
    """Steps between synchronisations with the device; rows are written then, each step still has its own."""
    save_every: int = 0
    """Save a checkpoint every N epochs; 0 saves none."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept, at least 2."""
    resume: str | None = None
    """Newest checkpoint of --run-name that verifies. `auto` begins at step 0 if there is none. Or the path of a run or step-N."""
    out: Path = Path("results")
    """Folder for lenet.csv and runs/."""
    run_name: str | None = None
    """Name of the folder under runs/; default model and time."""
    tensorboard: bool = True
    """Write TensorBoard events beside the CSV."""
    verdict: bool = True
    """Trace a few further steps after the last one, and say what limits the speed. Runs shorter than 20 steps, and those of
    Lightning's Trainer, have no verdict."""
    wandb: bool = False
    """The same scalars for Weights & Biases, in runs/NAME/wandb; WANDB_MODE=offline keeps them on this machine."""
    study: str = "train"
    """Column of lenet.csv: which command this run is part of."""
    variant: str = ""
    """Column of lenet.csv: which cell of the study's grid."""

    # Options of the GPT that core asks for, and that no vision run has.
    save_last: ClassVar[bool] = False
    save_async: ClassVar[bool] = False
    check_replicas: ClassVar[int] = 0

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        TORCHVISION_NEED,
        OptionNeed(
            "operators",
            lambda c: c.operators == "torch" or c.model not in WITHOUT_CUSTOM_OPERATORS,
            "{model} has none of our operators",
            "use --model lenet",
        ),
        OptionNeed(
            "batch_norm",
            lambda c: c.batch_norm == "local" or c.model in WITH_BATCH_NORM,
            "{model} has no batch norm",
            "use --model cnn",
        ),
        OptionNeed("momentum", lambda c: c.optimizer == "sgd", "{optimizer} takes no momentum", "use --optimizer sgd"),
        OptionNeed("keep_checkpoints", lambda c: c.save_every, "the run saves no checkpoint", "add --save-every 1"),
    )

    def __post_init__(self) -> None:
        check_name(self.model, MODEL_NAMES, "model", "in --model")
        ranges: dict[str, tuple[float, float]] = {
            "epochs": (1, 10**6), "max_steps": (1, 10**9), "batch_size": (1, 10**6), "seed": (0, 2**31 - 1),
            "num_workers": (0, 1024), "lr": (0.0, 100.0), "weight_decay": (0.0, 100.0), "momentum": (0.0, 1.0),
            "label_smoothing": (0.0, 0.999), "dist_timeout_s": (1.0, 86400.0), "eval_every": (1, 10**6),
            "log_every": (1, 10**6), "save_every": (0, 10**6), "keep_checkpoints": (2, 10**6),
        }  # fmt: skip
        check_ranges(self, ranges)
        if self.image_size is not None:
            check_side(self.model, self.image_size, f"image_size {self.image_size} is out of range")
        check_run_name(self.run_name, self.resume)
        if self.num_workers and self.loader == "fast":
            fix = "leave it out, or use --loader dataloader"
            raise ConfigError("the fast loader has no worker processes", "in --num-workers", fix)
        if not self.amp and self.precision not in ("bf16", "fp16"):
            raise ConfigError(f"{self.precision} has no autocast to leave out", "in --no-amp", "use bf16 or fp16")
        if self.precision == "fp16" and not self.amp and self.optimizer != "sgd":
            fix = "use --optimizer sgd, or leave --no-amp out"
            raise ConfigError(f"the second moments of {self.optimizer} underflow in fp16", "in --no-amp", fix)
        self._check_loss_scale()
        if self.wandb:
            check_wandb()

    def _check_loss_scale(self) -> None:
        if self.loss_scale is None:
            return
        if self.precision != "fp16":
            why = "bf16 has fp32's range" if self.precision == "bf16" else "nothing underflows"
            fix = "leave it out, or use --precision fp16"
            raise ConfigError(f"a loss scale is pointless with {self.precision}: {why}", "in --loss-scale", fix)
        with suppress(ValueError):
            if self.loss_scale in ("dynamic", "none") or 1 <= float(self.loss_scale) <= MAX_LOSS_SCALE:
                return
        what = f"loss_scale {self.loss_scale!r} is neither a word nor a number in range"
        raise ConfigError(what, "in --loss-scale", f"use dynamic, none, or a number of 1 to {MAX_LOSS_SCALE:.0f}")

    @property
    def resolved_loss_scale(self) -> str | None:
        """The loss scale as dynamic, none or a number, and None for a precision that has no use for one."""
        if self.precision != "fp16":
            return None
        return self.loss_scale or ("dynamic" if self.amp else "none")


def imports_of(config: VisionConfig) -> tuple[str, ...]:
    """Return the modules that each process of a run imports, with those of its strategy."""
    if config.strategy in BY_TRAINER:
        return (*RUN_IMPORTS, "gptscale.lenet.run.trainer")
    return (*RUN_IMPORTS, "lightning_fabric") if config.strategy == "fabric" else RUN_IMPORTS


def option_words(config: VisionConfig) -> list[str]:
    """Return the words of a command line that make `config`, an option for each field that is not its default."""
    return changed_options(config, VisionConfig())


Schedule = Literal["constant", "cosine", "onecycle"]


def rate(schedule: Schedule, step: int, *, peak: float, total_steps: int) -> float:
    """Return the learning rate of 0-based `step` by the named schedule, where cosine falls to 0 without warm-up.

    onecycle is torch.optim.lr_scheduler.OneCycleLR with its defaults, but without its cycle of momentum (Smith & Topin 2018,
    arXiv 1708.07120): in 0.3 of the steps it goes up by a half cosine from peak / 25 to `peak`, then down by another to a
    ten-thousandth of where it began.
    """
    if schedule != "onecycle":
        return learning_rate(step, peak=peak, total_steps=total_steps, schedule=schedule, min_ratio=0.0)
    low, top, last = peak / 25.0, 0.3 * total_steps - 1, total_steps - 1
    if step <= top:
        begin, end, fraction = low, peak, step / top if top > 0 else 1.0
    else:
        begin, end, fraction = peak, low / 1e4, min(1.0, (step - top) / (last - top))
    return end + (begin - end) / 2 * (1 + math.cos(math.pi * fraction))
