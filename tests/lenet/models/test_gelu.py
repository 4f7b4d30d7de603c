"""Tests of this package's GELU inside LeNet: it is torch's function, and LeNet trains with it."""

from functools import cache

import pytest
import torch
from vision_runs import loss_and_gradient

from gptscale.common.engine import Batch
from gptscale.lenet.data.loader import BatchOrder, FastLoader, Normalise
from gptscale.lenet.data.sources import open_data
from gptscale.lenet.models.registry import ImageShape, build_model
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import world_from_environment

FORMULAS = ("erf", "tanh", "sigmoid")
# These are five epochs of the embedded digits. The last of them is judged.
STEPS, LAST = 210, 42
SEEDS = (1, 2, 3)


@cache
def losses(gelu, seed):
    """Return the training losses of LeNet on the embedded digits, 210 steps of 32 images."""
    pytest.importorskip("sklearn")
    from pathlib import Path

    config = VisionConfig(gelu=gelu, seed=seed, lr=2e-3, device="cpu")
    data = open_data("digits", root=Path())
    engine = VisionEngine(config, ImageShape(1, 28, 10), world_from_environment(config))
    loader = FastLoader(data.train, BatchOrder(len(data.train), 32, seed), Normalise(torch.device("cpu")), "none")
    found, step = [], 0
    for epoch in range(STEPS // 42):
        for images, labels in loader.epoch(epoch):
            found.append(engine.train_step(Batch(step, images, labels), config.lr).loss.item())
            step += 1
    return found


def last_epoch_loss(gelu, seed):
    """Return the mean loss of the last epoch."""
    return sum(losses(gelu, seed)[-LAST:]) / LAST


@pytest.mark.parametrize("model", ["lenet", "lenet_classic", "cnn", "vgg11"])
@pytest.mark.parametrize("formula", FORMULAS)
def test_at_equal_weights_loss_and_gradients_are_equal(model, formula):
    """Losses near 2.3 must agree to 1e-6, and gradients as vectors to 1e-5 of their length."""
    (loss, gradient), *others = (
        loss_and_gradient(build_model(model, ImageShape(1, 28, 10), gelu=gelu, seed=4), 1, 28)
        for gelu in (formula, f"custom-{formula}", f"python-{formula}")
    )
    for of_ours, by_ours in others:
        assert abs(of_ours - loss) < 1e-6
        assert float((by_ours - gradient).norm() / gradient.norm()) < (1e-4 if model == "vgg11" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("formula", FORMULAS)
def test_trained_with_it_the_difference_is_smaller_than_that_of_seeds(formula):
    """The last epoch's loss differs less between the two operators than between three seeds of torch's erf."""
    ours, theirs = last_epoch_loss(f"custom-{formula}", SEEDS[0]), last_epoch_loss(formula, SEEDS[0])
    over_seeds = [last_epoch_loss(FORMULAS[0], seed) for seed in SEEDS]
    # The model has learned.
    assert theirs < 0.3 < losses(formula, SEEDS[0])[0]
    assert abs(ours - theirs) < max(over_seeds) - min(over_seeds)
