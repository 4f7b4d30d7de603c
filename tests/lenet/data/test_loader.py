import math

import numpy as np
import pytest
import torch
from PIL import Image

from gptscale.common.errors import ConfigError, DataError
from gptscale.lenet.data.augment import AUGMENTATIONS, AugmentationRanges, augment, draw
from gptscale.lenet.data.loader import BatchOrder, FastLoader, Normalise, PilLoader, pil_transform, rank_part
from gptscale.lenet.data.sources import LabelledImages

CPU = torch.device("cpu")


def numbered(n, side=4, channels=1):
    """Return images whose pixels all have the image's number as their value, with the same labels."""
    values = torch.arange(n, dtype=torch.uint8)
    return LabelledImages(values.view(n, 1, 1, 1).expand(n, channels, side, side).contiguous(), values.long())


def both(part, batch_order, augmentation="none"):
    return [
        FastLoader(part, batch_order, Normalise(CPU), augmentation),
        PilLoader(part, batch_order, Normalise(CPU), augmentation, 0),
        PilLoader(part, batch_order, Normalise(CPU), augmentation, 2),
    ]


def test_every_loader_walks_alike():
    part, batch_order = numbered(100, side=28), BatchOrder(100, 16, seed=3)
    epochs = [[labels.tolist() for _, labels in loader.epoch(1)] for loader in both(part, batch_order)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(epochs[0]) == batch_order.steps_per_epoch == 6
    seen = [i for batch in epochs[0] for i in batch]
    assert len(set(seen)) == 96
    for loader in both(part, batch_order)[:2]:
        for images, labels in loader.epoch(1):
            assert torch.allclose(images[:, 0, 0, 0], labels / 255 * 2 - 1, atol=1e-6)


def test_order_is_a_function_of_seed_and_epoch():
    batch_order = BatchOrder(1000, 10, seed=1)
    assert np.array_equal(batch_order.order(4), BatchOrder(1000, 50, seed=1).order(4))
    assert sorted(batch_order.order(4)) == list(range(1000))
    assert not np.array_equal(batch_order.order(4), batch_order.order(5))
    assert not np.array_equal(batch_order.order(4), BatchOrder(1000, 10, seed=2).order(4))


@pytest.mark.parametrize("augmentation", ["affine", "jitter"])
def test_a_loader_continues_and_splits_without_a_trace(augmentation):
    """The same augmented images come when an epoch starts at a later step, and when ranks share it."""
    random = torch.Generator().manual_seed(0)
    part = LabelledImages(torch.randint(0, 256, (64, 3, 28, 28), generator=random).to(torch.uint8), torch.arange(64))
    for make in (
        lambda batch_order: FastLoader(part, batch_order, Normalise(CPU), augmentation),
        lambda batch_order: PilLoader(part, batch_order, Normalise(CPU), augmentation, 0),
    ):
        whole = list(make(BatchOrder(64, 8, seed=3)).epoch(2))
        later = list(make(BatchOrder(64, 8, seed=3)).epoch(2, first_step=5))
        assert len(later) == 3
        assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[5:], later, strict=True))
        ranks = [list(make(BatchOrder(64, 8, 3, rank, 2)).epoch(2)) for rank in range(2)]
        for step, (images, labels) in enumerate(whole):
            assert torch.equal(torch.cat([r[step][0] for r in ranks]), images)
            assert torch.equal(torch.cat([r[step][1] for r in ranks]), labels)


def test_the_test_images_of_all_ranks_are_each_image_once():
    for n in (10_000, 41, 3):
        for world in (1, 2, 3, 7, 64):
            seen = [i for rank in range(world) for i in range(n)[rank_part(n, rank, world)]]
            assert seen == list(range(n))


def test_a_batch_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="global batch 33 is not divisible by 2 ranks, in --batch-size, use 32 or 34"):
        BatchOrder(100, 33, 0, 0, 2)
    with pytest.raises(DataError, match="20 training images, expected at least one batch of 32"):
        BatchOrder(20, 32, 0)


@pytest.mark.parametrize("side", [28, 32])
def test_affine_is_torchvisions(side):
    """With the same angle, shift and scale torchvision gives the same pixels, but for a few at the edge of rounding."""
    functional = pytest.importorskip("torchvision.transforms.functional")
    images = torch.randint(0, 256, (64, 1, side, side), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    recipe = AUGMENTATIONS["affine"]
    assert recipe is not None
    draws = draw(64, 5, 0, CPU)
    ours = augment(images, recipe, draws)
    same = 0.0
    for image, result, (a, tx, ty, s) in zip(images, ours, draws[:, :4].tolist(), strict=True):
        pil = Image.fromarray(image[0].numpy())
        shift = [round((2 * t - 1) * 0.1 * side) for t in (tx, ty)]
        theirs = functional.affine(pil, (2 * a - 1) * 15, shift, 0.8 + 0.4 * s, [0.0, 0.0])
        same += float((torch.from_numpy(np.array(theirs)) == result[0]).float().mean())
    assert same / 64 > 0.995


def test_nothing_drawn_changes_nothing_and_a_mirror_mirrors():
    images = torch.randint(0, 256, (10, 3, 28, 28), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    draws = torch.full((10, 8), 0.5)
    assert torch.equal(augment(images, AugmentationRanges(degrees=15, translate=0.1, scale=(0.8, 1.2)), draws), images)
    draws[:5, 4] = 0.2
    mirrored = augment(images, AugmentationRanges(flip=True), draws)
    assert torch.equal(mirrored[:5], images[:5].flip(3))
    assert torch.equal(mirrored[5:], images[5:])
    draws[:, 1] = 1.0
    # The images move by 3.5 pixels, which round to 4, to the right.
    shifted = augment(images, AugmentationRanges(translate=0.125), draws)
    assert torch.equal(shifted[:, :, :, 4:], images[:, :, :, :-4])
    assert int(shifted[:, :, :, :4].max()) == 0


def test_jitter_is_torchvisions():
    """Compare brightness, contrast and saturation, in this order, in floating point: on bytes torchvision truncates."""
    functional = pytest.importorskip("torchvision.transforms.functional")
    images = torch.randint(0, 256, (8, 3, 28, 28), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    draws = draw(8, 1, 1, CPU)
    ours = augment(images, AugmentationRanges(jitter=0.2), draws)
    for image, result, row in zip(images, ours, draws[:, 5:].tolist(), strict=True):
        b, c, s = (0.8 + 0.4 * value for value in row)
        theirs = functional.adjust_brightness(image / 255, b)
        theirs = functional.adjust_saturation(functional.adjust_contrast(theirs, c), s)
        # Their weights of luma have four digits, ours three.
        assert float((theirs * 255 - result).abs().max()) <= 0.51


def test_draws_are_uniform_and_differ_between_epochs():
    draws = draw(20_000, 7, 3, CPU)
    assert 0 <= float(draws.min()) <= float(draws.max()) < 1
    assert (draws.mean(0) - 0.5).abs().max() < 5 * math.sqrt(1 / 12 / 20_000)
    assert not torch.equal(draws, draw(20_000, 7, 4, CPU))


def test_pil_and_batched_affine_have_the_same_mean_image():
    """The mean over many draws is the same image, so that the distributions are the same and not only their ranges."""
    pytest.importorskip("torchvision")
    image = torch.zeros(1, 28, 28, dtype=torch.uint8)
    image[:, 8:20, 11:17] = 255
    recipe = AUGMENTATIONS["affine"]
    assert recipe is not None
    n = 2000
    ours = augment(image.expand(n, 1, 28, 28), recipe, draw(n, 1, 1, CPU)).float().mean(0) / 127.5 - 1
    transform, pil = pil_transform("affine", 28), Image.fromarray(image[0].numpy())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = torch.stack([transform(pil) for _ in range(n)]).mean(0)
    # The spread of one pixel's mean is at most 1 / sqrt(n) = 0.022.
    assert float((ours - theirs).abs().max()) < 0.15
