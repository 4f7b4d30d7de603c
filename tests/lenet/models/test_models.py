import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gptscale.common.errors import ConfigError
from gptscale.lenet.models import MODEL_NAMES
from gptscale.lenet.models.registry import C3_SEES, MODELS, ImageShape, PartialConv2d, Subsampling, build_model
from gptscale.lenet.run.config import rate

MNIST, CIFAR = ImageShape(1, 28, 10), ImageShape(3, 32, 10)


SHAPES = (MNIST, CIFAR, ImageShape(3, 28, 7), ImageShape(1, 32, 2))
# The large VGGs are slow, and of the same code as vgg11 and vgg19_quarter.
ONE_SHAPE = ("vgg13", "vgg16", "vgg19")


@pytest.mark.parametrize(
    ("name", "shape"), [(n, s) for n in MODELS for s in SHAPES if s == CIFAR or n not in ONE_SHAPE], ids=str
)
def test_every_model_takes_every_shape_and_every_weight_learns(name, shape):
    """The depth in a VGG's name counts the convolutions and three linear layers, of which one is left at this size."""
    model = build_model(name, shape, seed=1)
    if depth := re.fullmatch(r"vgg(\d+)", name):
        assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == int(depth[1]) - 3
    logits = model(torch.randn(4, shape.channels, shape.side, shape.side))
    assert logits.shape == (4, shape.n_classes)
    F.cross_entropy(logits, torch.tensor([0, 1, 0, 1])).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


def test_resnet18_takes_small_images_and_others_say_what_they_take():
    assert build_model("resnet18", ImageShape(3, 16, 10))(torch.randn(2, 3, 16, 16)).shape == (2, 10)
    with pytest.raises(ConfigError, match="use 16, 28 or 32"):
        build_model("resnet18", ImageShape(3, 20, 10))
    with pytest.raises(ConfigError, match="16 pixels, in --image-size, use 28 or 32"):
        build_model("vgg11", ImageShape(3, 16, 10))


SIZES = {
    ("lenet", MNIST): 156 + 2416 + 48120 + 10164 + 850,
    # The layers of 1998: C1, S2, C3 (with all 2400 weights, of which the mask leaves 1500), S4, C5, F6, output.
    ("lenet_classic", MNIST): 156 + 12 + 2416 + 32 + 48120 + 10164 + 850,
    ("pure_linear", MNIST): 784 * 128 + 128 + 1290,
    ("resnet18", CIFAR): 11_173_962,
}


@pytest.mark.parametrize(("name", "shape"), SIZES)
def test_sizes(name, shape):
    assert sum(p.numel() for p in build_model(name, shape).parameters()) == SIZES[name, shape]


def test_shared_convolutions_are_one():
    shared, own = (build_model(f"conv10_{kind}", MNIST) for kind in ("shared", "independent"))
    assert sum(isinstance(m, nn.Conv2d) for m in shared.modules()) == 2
    assert sum(isinstance(m, nn.Conv2d) for m in own.modules()) == 10
    two = [build_model(f"conv2_{kind}", MNIST, seed=3) for kind in ("shared", "independent")]
    x = torch.randn(2, 1, 28, 28)
    # With only one convolution to repeat, there is nothing to share.
    assert torch.equal(two[0](x), two[1](x))


def test_the_partial_connections_are_the_papers():
    layer = PartialConv2d()
    assert [int(n) for n in layer.sees.sum((1, 2, 3))] == [3] * 6 + [4] * 9 + [6]
    assert int(layer.sees.sum()) * 25 + 16 == 1516
    assert len(set(C3_SEES)) == 16
    x = torch.randn(1, 6, 14, 14)
    blind = x.clone()
    # The first map sees 0, 1 and 2 only.
    blind[:, [3, 4, 5]] = 0
    assert torch.equal(layer(x)[:, 0], layer(blind)[:, 0])


def test_subsampling_is_a_scaled_mean():
    layer = Subsampling(2)
    with torch.no_grad():
        layer.coefficient.copy_(torch.tensor([2.0, 3.0]))
        layer.bias.copy_(torch.tensor([1.0, -1.0]))
    assert layer(torch.full((1, 2, 4, 4), 5.0))[0, :, 0, 0].tolist() == [11.0, 14.0]


def test_relu_after_pooling_is_relu_before_it():
    model, x = build_model("lenet", MNIST, seed=2), torch.randn(8, 1, 28, 28)
    y = x
    for convolution in model.features:
        y = F.max_pool2d(F.relu(convolution(y)), 2)
    assert torch.equal(model.head(y.flatten(1)), model(x))


def test_weights_are_a_function_of_the_seed_and_cost_no_random_number():
    before = torch.random.get_rng_state()
    a, b, c = (build_model("lenet", MNIST, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(next(a.parameters()), next(c.parameters()))


def test_the_names_are_those_of_the_builders():
    assert tuple(MODELS) == MODEL_NAMES


def test_onecycle_is_torchs():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=200, cycle_momentum=False)
    for step in range(200):
        assert rate("onecycle", step, peak=0.1, total_steps=200) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        if step < 199:
            schedule.step()


def test_the_other_rates():
    assert rate("constant", 57, peak=0.1, total_steps=100) == 0.1
    cosine = [rate("cosine", step, peak=0.1, total_steps=101) for step in range(101)]
    assert cosine[0] == 0.1
    assert cosine[50] == pytest.approx(0.05)
    assert cosine[100] == pytest.approx(0)
