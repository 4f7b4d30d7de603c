"""The exercise's data loader: an epoch gives each sequence once, and a batch depends on seed and step alone."""

import psutil
import pytest
import torch

from gptscale.common.data.exercise_loader import ExerciseBatches
from gptscale.common.data.loader import Prefetcher
from gptscale.common.errors import ConfigError
from gptscale.common.model.loss import IGNORE
from gptscale.common.process.world import World
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig

CPU = torch.device("cpu")


def made(data_rank=0, data_size=1, *, n=32, workers=0, batch=8):
    config = RunConfig(seq_len=16)
    run = Run("handout", config, config.gpt(), plan_batch(data_size, global_batch_size=batch), World(0, 0, 1, CPU, 60))
    return ExerciseBatches(run, n, workers, data_rank, data_size)


def same(a, b):
    return a.sequences == b.sequences and torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


def test_targets_are_the_next_ids_and_the_last_counts_nothing():
    batch = made().batch(0)
    assert batch.inputs.shape == batch.targets.shape == (8, 16)
    assert torch.equal(batch.targets[:, :-1], batch.inputs[:, 1:])
    assert (batch.targets[:, -1] == IGNORE).all()


@pytest.mark.parametrize("data_size", [1, 2])
def test_an_epoch_has_every_sequence_once_and_the_next_has_another_order(data_size):
    ranks = [made(rank, data_size) for rank in range(data_size)]
    epochs = []
    for epoch in range(2):
        steps = range(4 * epoch, 4 * epoch + 4)
        batches = [rank.batch(step) for step in steps for rank in ranks]
        # Those of any rank are known beforehand.
        assert [b.sequences for b in batches] == [ranks[0].sequences(s, r) for s in steps for r in range(data_size)]
        epochs.append([sequence for batch in batches for sequence in batch.sequences])
        assert sorted(epochs[-1]) == list(range(32))
    assert epochs[0] != epochs[1]


def test_a_resumed_run_reads_on_where_it_was():
    unbroken = made()
    batches = [unbroken.batch(step) for step in range(8)]
    resumed = made()
    assert all(same(resumed.batch(step), batches[step]) for step in (6, 7, 2, 3))


@pytest.mark.world
def test_workers_give_the_same_batches_and_end_with_the_reader():
    expected = [made().batch(step) for step in range(5)]
    before = set(psutil.Process().children(recursive=True))
    with Prefetcher(made(workers=2), CPU) as data:
        assert all(same(data.get(step), batch) for step, batch in enumerate(expected))
        workers = set(psutil.Process().children(recursive=True)) - before
        assert len(workers) >= 2
    # torch waits 5 s for each, which may be too short on a busy machine, and then ends them without waiting.
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def test_too_few_sequences_are_one_line():
    with pytest.raises(ConfigError, match="4 sequences are less than a global batch of 8"):
        made(n=4)
