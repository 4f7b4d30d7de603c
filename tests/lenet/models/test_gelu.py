"""Tests of this package's GELU inside LeNet: it is torch's function, and LeNet trains with it."""

import pytest
from vision_runs import loss_and_gradient, run, table

from gptscale.lenet.models.registry import ImageShape, build_model

FORMULAS = ("erf", "tanh", "sigmoid")


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
def test_trained_with_it_the_difference_is_smaller_than_that_of_seeds(tmp_path):
    """The last epoch's loss differs less between the two operators than between three seeds of torch's erf."""
    pytest.importorskip("sklearn")

    def losses(gelu, seed=1):
        options = {"gelu": gelu, "seed": seed, "epochs": 5, "lr": 2e-3, "augment": "none"}
        return table(run(tmp_path, f"{gelu}-{seed}", **options), "epochs.csv").train_loss.tolist()

    of_torch = {formula: losses(formula) for formula in FORMULAS}
    over_seeds = [of_torch["erf"][-1], *(losses("erf", seed)[-1] for seed in (2, 3))]
    for formula, theirs in of_torch.items():
        # The model has learned.
        assert theirs[-1] < 0.3 < theirs[0]
        assert abs(losses(f"custom-{formula}")[-1] - theirs[-1]) < max(over_seeds) - min(over_seeds)
