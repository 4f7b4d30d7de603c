"""The order of sequences, a pure function of the step: a run resumes anywhere, and every world sees the same batch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

ROUNDS = 4
# Places worked out at once: for the few places of one step, calling numpy costs many times the arithmetic.
BLOCK = 256
MASK = np.uint64(0xFFFFFFFF)


def _mix(values: np.ndarray, key: int) -> np.ndarray:
    """Return a 32-bit hash of each uint64 value, by multiplying and folding with constants of MurmurHash3's finaliser."""
    mixed = (values ^ np.uint64(key & 0xFFFFFFFF)) * np.uint64(0x85EBCA6B) & MASK
    mixed ^= mixed >> np.uint64(13)
    mixed = mixed * np.uint64(0xC2B2AE35) & MASK
    return mixed ^ (mixed >> np.uint64(16))


def permuted(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the images of `index` (int64, in [0, n)) under a permutation of [0, n) that seed and epoch fix.

    No table is held. A Feistel network over the next even power of two is a bijection whatever its round function. Values
    that land outside [0, n) walk on along their cycle until they are inside (Black & Rogaway 2002, "Ciphers with Arbitrary
    Finite Domains").
    """
    half = max(1, -(-max(1, (n - 1).bit_length()) // 2))
    half_bits, half_mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = [int(k) for k in np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS)]
    result = index.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        value = result[outside]
        left, right = value >> half_bits, value & half_mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & half_mask)
        result[outside] = (left << half_bits) | right
        outside = result >= np.uint64(n)
    return result.astype(np.int64)


def sequence_indices(
    step: int, *, seed: int, n_sequences: int, global_batch_size: int, data_rank: int = 0, data_size: int = 1
) -> tuple[int, ...]:
    """Return the indices of the sequences that `data_rank` of `data_size` trains on in 0-based `step`.

    The run walks through epochs of `n_sequences`, each in an order of its own. A step takes the next `global_batch_size`
    sequences, if need be across an epoch's end, and rank r takes the r-th equal part of them.
    """
    share = global_batch_size // data_size
    first = step * global_batch_size + data_rank * share
    blocks = range(first // BLOCK, (first + share - 1) // BLOCK + 1)
    walk = np.concatenate([_block_of_walk(block, seed, n_sequences) for block in blocks])
    begin = first - blocks[0] * BLOCK
    return tuple(int(i) for i in walk[begin : begin + share])


@lru_cache(maxsize=16)
def _block_of_walk(block: int, seed: int, n_sequences: int) -> np.ndarray:
    """Return the sequences at places [block * BLOCK, (block + 1) * BLOCK) of the run's walk through its epochs."""
    epochs, index = np.divmod(block * BLOCK + np.arange(BLOCK, dtype=np.int64), n_sequences)
    walk = np.empty_like(index)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        walk[in_epoch] = permuted(index[in_epoch], n_sequences, seed, int(epoch))
    return walk
