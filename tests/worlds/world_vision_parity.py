"""One rank of two, which compares data parallelism with one process's arithmetic, for each kind of batch norm."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptscale.common.engine import Batch
from gptscale.common.process.world import World, gather_objects, process_group
from gptscale.lenet.models.registry import ImageShape
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.loop import TestSet
from gptscale.lenet.run.preflight import ReadyVisionRun, ready_run, world_from_environment

STEPS, BATCH, SHAPE = 5, 16, ImageShape(1, 28, 10)
TOLERANCE = 1e-5


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same global batches on every rank."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield torch.randn(BATCH, 1, 28, 28, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


def without_dropout(engine: VisionEngine) -> VisionEngine:
    for module in engine.module.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return engine


def train_on_ranks(config: VisionConfig, world: World) -> tuple[list[float], VisionEngine]:
    """Return the losses over the global batch, from an engine on each rank."""
    engine, losses, share = without_dropout(VisionEngine(config, SHAPE, world)), [], BATCH // world.world_size
    for step, (images, labels) in enumerate(batches()):
        part = slice(world.rank * share, (world.rank + 1) * share)
        shares = gather_objects(engine.train_step(Batch(step, images[part], labels[part]), config.lr).loss.item())
        losses.append(sum(shares) / len(shares))
    return losses, engine


def train_by_hand(config: VisionConfig, world: World, parts: int) -> tuple[list[float], nn.Module]:
    """Return one process's losses when it normalises the batch in `parts` parts, each by its own statistics."""
    alone = without_dropout(VisionEngine(config, SHAPE, dataclasses.replace(world, rank=0, world_size=1)))
    losses = []
    for images, labels in batches():
        total = 0.0
        for x, y in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            loss = F.cross_entropy(alone.module(x), y) / parts
            loss.backward()
            total += loss.item()
        alone.optimizer.step()
        alone.optimizer.zero_grad()
        losses.append(total)
    return losses, alone.module


def largest_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def largest_weight_difference(a: nn.Module, b: nn.Module) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def check_models(world: World) -> None:
    """Check models without batch norm, with the batch's statistics, and with each rank's own.

    With each rank's own statistics the result is that of a batch normalised in halves.
    """
    base = VisionConfig(optimizer="sgd", lr=0.05, channels_last=False, device="cpu")
    one, alone = train_by_hand(base, world, 1)
    losses, engine = train_on_ranks(base, world)
    assert largest_difference(losses, one) <= TOLERANCE
    assert largest_weight_difference(engine.module, alone) <= TOLERANCE
    # VGG is no use here: on images of noise its last layers normalise 16 numbers, and rounding grows tenfold with each step.
    normed = dataclasses.replace(base, model="cnn", lr=0.01)
    one, alone = train_by_hand(normed, world, 1)
    halves, split = train_by_hand(normed, world, 2)
    synced, engine = train_on_ranks(dataclasses.replace(normed, batch_norm="sync"), world)
    assert largest_difference(synced, one) <= TOLERANCE, (synced, one)
    buffers = dict(engine.module.named_buffers())
    for name, buffer in alone.named_buffers():
        assert torch.allclose(buffers[name], buffer, rtol=1e-4, atol=1e-5), name
    local, engine = train_on_ranks(normed, world)
    assert largest_difference(local, halves) <= TOLERANCE, (local, halves)
    # This is another computation than that of one process.
    assert largest_difference(local, one) > 1e-3
    assert largest_weight_difference(engine.module, split) <= 1e-4
    before = gather_objects({n: b.clone() for n, b in engine.module.named_buffers()})
    engine.settle()
    for name, buffer in engine.module.named_buffers():
        if "running" in name:
            assert not torch.equal(before[0][name], before[1][name])
            assert torch.allclose(buffer, (before[0][name] + before[1][name]) / 2)


def check_test_set(ready: ReadyVisionRun) -> None:
    """Check that every test image is counted once, by class, and that the score is that of one process."""
    engine = VisionEngine(ready.config, ready.shape, ready.world)
    score = engine.evaluate(TestSet(ready).batches())
    assert sum(score.total) == len(ready.data.test) == 41
    assert list(score.total) == torch.bincount(ready.data.test.labels, minlength=10).tolist()
    images = ready.normalise()(ready.data.test.images)
    with torch.no_grad():
        logits = engine.module(images)
    assert sum(score.correct) == int((logits.argmax(1) == ready.data.test.labels).sum())
    assert abs(score.loss - F.cross_entropy(logits, ready.data.test.labels).item()) < 1e-6


def main(folder: Path) -> None:
    config = VisionConfig(data=str(folder), batch_size=16, device="cpu")
    world = world_from_environment(config)
    with process_group(world):
        check_models(world)
        check_test_set(ready_run(config, world))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
