"""Tests with the sample of CIFAR-10: every model learns from it, in every precision that the processor has."""

import pytest
import torch
from vision_runs import run

from gptscale.common.engine import Batch
from gptscale.lenet.data.loader import Normalise
from gptscale.lenet.data.sources import open_data
from gptscale.lenet.models.registry import MODELS, ImageShape
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import world_from_environment

STEPS = 8
LARGE = ("vgg", "resnet")


@pytest.fixture(scope="module")
def sample(cifar_sample):
    return open_data(str(cifar_sample), root=cifar_sample)


def losses(sample, n_images, **options):
    """Return the losses of STEPS steps on the same first images of every class."""
    config = VisionConfig(device="cpu", **options)
    engine = VisionEngine(config, ImageShape(3, 32, 10), world_from_environment(config))
    # The images lie class by class.
    chosen = torch.arange(n_images) * (len(sample.train) // n_images)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision, torch.float32)
    images = Normalise(torch.device("cpu"), torch.float32 if config.amp else dtype)(sample.train.images[chosen])
    labels = sample.train.labels[chosen]
    return [engine.train_step(Batch(step, images, labels), config.lr).loss.item() for step in range(STEPS)]


def test_the_sample_is_read_from_its_folders(sample):
    assert (len(sample.train), len(sample.test), sample.channels, sample.side) == (4000, 1000, 3, 32)
    assert sample.classes[0] == "airplane"


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in MODELS if model not in ("vgg13", "vgg16", "vgg19")])
def test_every_model_learns(sample, model):
    """VGG has one code for its depths. Nets of ten convolutions lose the signal without batch norm, and hardly learn."""
    found = losses(sample, 10 if model.startswith(LARGE) else 40, model=model, lr=1e-3)
    assert found[-1] < found[0] - (0 if model.startswith("conv10") else 0.05), found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-pure", "fp16-pure"])
def test_every_precision_learns(sample, precision):
    name, _, pure = precision.partition("-")
    # torch emulates short types on most processors, many times slower than fp32.
    n_images = 40 if name == "fp32" else 10
    found = losses(sample, n_images, model="cnn", precision=name, amp=not pure, optimizer="sgd", lr=0.01)
    assert found[-1] < found[0] - 0.2, found


@pytest.mark.slow
def test_a_net_passes_40_percent(cifar_sample, tmp_path):
    """Train the CNN for one epoch: it had 44.9 % right."""
    options = {"model": "cnn", "epochs": 1, "batch_size": 16, "lr": 1e-3, "seed": 1, "augment": "none"}
    options |= {"optimizer": "adamw", "lr_schedule": "onecycle", "label_smoothing": 0.1}
    assert run(tmp_path, "r", data=str(cifar_sample), **options).row["test_accuracy"] >= 0.4
