import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gptscale.common.data.order import permuted, sequence_indices

seeds = st.integers(0, 2**31 - 1)
epochs = st.integers(0, 10**6)


@given(n=st.integers(1, 3000), seed=seeds, epoch=epochs)
def test_an_epoch_is_a_permutation(n, seed, epoch):
    assert sorted(permuted(np.arange(n), n, seed, epoch)) == list(range(n))


@given(n=st.integers(2**31, 2**50), start=st.integers(0, 2**31 - 1000), seed=seeds)
def test_a_huge_epoch_needs_no_table(n, start, seed):
    images = permuted(np.arange(start, start + 1000), n, seed, 0)
    assert len(set(images.tolist())) == 1000
    assert images.min() >= 0
    assert images.max() < n


@given(n=st.integers(1, 60), batch=st.sampled_from([4, 8, 20, 64]), start=st.integers(0, 1000), seed=seeds)
@settings(max_examples=50)
def test_every_world_sees_the_same_global_batch_in_the_same_order(n, batch, start, seed):
    common = {"seed": seed, "n_sequences": n, "global_batch_size": batch}
    for step in range(start, start + 3):
        alone = sequence_indices(step, **common)
        assert len(alone) == batch
        for data_size in (2, 4):
            ranks = [sequence_indices(step, **common, data_rank=r, data_size=data_size) for r in range(data_size)]
            assert sum(ranks, ()) == alone


@given(n=st.integers(1, 60), batch=st.integers(1, 100), seed=seeds)
@settings(max_examples=50)
def test_each_epoch_has_every_sequence_once_even_if_steps_straddle_it(n, batch, seed):
    steps = -(-3 * n // batch)
    walked = sum((sequence_indices(s, seed=seed, n_sequences=n, global_batch_size=batch) for s in range(steps)), ())
    for epoch in range(3):
        assert sorted(walked[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_and_seeds_have_orders_of_their_own():
    index = np.arange(1000)
    orders = [tuple(permuted(index, 1000, seed, epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    for order in orders:
        assert abs(np.corrcoef(index, order)[0, 1]) < 0.15
        # A random permutation keeps about one number in its place.
        assert (index == order).sum() < 10


def test_the_order_never_changes_because_saved_runs_continue_in_it():
    assert permuted(np.arange(10), 10, 1234, 0).tolist() == [0, 7, 2, 8, 6, 9, 4, 3, 5, 1]
    assert sequence_indices(3, seed=1234, n_sequences=20, global_batch_size=6) == (0, 17, 1, 9, 0, 18)


def test_a_batch_larger_than_a_block_is_the_walk_of_smaller_ones():
    small = [sequence_indices(step, seed=5, n_sequences=333, global_batch_size=10) for step in range(300)]
    large = [sequence_indices(step, seed=5, n_sequences=333, global_batch_size=1500) for step in range(2)]
    assert sum(small, ()) == sum(large, ())
