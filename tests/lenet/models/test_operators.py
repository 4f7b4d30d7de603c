"""Tests of `--operators custom`: the models use this package's operators and compute the same with them."""

import pytest
import torch
from torch import nn
from vision_runs import loss_and_gradient, run

from gptscale.lenet.models.registry import Convolutions, CustomMaxPool2d, ImageShape, LeNet5, build_model


@pytest.mark.parametrize("side", [28, 32])
@pytest.mark.parametrize("model", ["lenet", "simple_conv", "cnn", "conv2_shared", "conv10_independent", "vgg11"])
def test_the_same_function(model, side):
    """Losses must agree to 1e-6, and gradients as vectors to 1e-5 of their length."""
    found = []
    for custom in (False, True):
        net = build_model(model, ImageShape(3, side, 10), custom=custom, seed=4).train()
        found.append(loss_and_gradient(net, 3, side))
        pools = {type(m) for m in net.modules() if isinstance(m, nn.MaxPool2d)}
        assert pools == {CustomMaxPool2d if custom else nn.MaxPool2d}
        assert all(m.fused is custom for m in net.modules() if isinstance(m, (LeNet5, Convolutions)))
    (loss, gradient), (custom_loss, custom_gradient) = found
    assert custom_loss == pytest.approx(loss, abs=1e-6)
    assert (custom_gradient - gradient).norm() <= 1e-5 * gradient.norm()


def test_gelu_is_not_fused_away():
    """Convolution, bias and ReLU are one operator. With GELU they must stay separate."""
    images = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    plain, custom = (build_model("lenet", ImageShape(1, 28, 10), gelu="erf", custom=c, seed=4) for c in (False, True))
    torch.testing.assert_close(custom(images), plain(images), rtol=1e-5, atol=1e-6)


def test_a_run_by_them(tmp_path):
    pytest.importorskip("sklearn")
    plain, custom = (run(tmp_path, o, operators=o, max_steps=20, epochs=1).row for o in ("torch", "custom"))
    assert (plain["operators"], custom["operators"]) == ("torch", "custom")
    assert custom["loss_last"] == pytest.approx(plain["loss_last"], rel=1e-4)
