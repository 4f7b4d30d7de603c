"""Which sequences a step trains on: a pure function, so that a run resumes anywhere and every world sees the same batch."""

from __future__ import annotations

import numpy as np

ROUNDS = 4
MASK = np.uint64(0xFFFFFFFF)


def _mix(values: np.ndarray, key: int) -> np.ndarray:
    """A 32-bit hash of each uint64 value: multiply and fold, with constants from MurmurHash3's finaliser."""
    mixed = (values ^ np.uint64(key & 0xFFFFFFFF)) * np.uint64(0x85EBCA6B) & MASK
    mixed ^= mixed >> np.uint64(13)
    mixed = mixed * np.uint64(0xC2B2AE35) & MASK
    return mixed ^ (mixed >> np.uint64(16))


def permuted(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Images of `index` (int64, in [0, n)) under a permutation of [0, n) fixed by seed and epoch; no table is held.

    A Feistel network over the next even power of two is a bijection whatever its round function; values that land
    outside [0, n) walk on along their cycle until they are inside (Black & Rogaway 2002, "Ciphers with Arbitrary Finite
    Domains").
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
    """Indices of the sequences that `data_rank` of `data_size` trains on in 0-based `step`.

    The run walks through epochs of `n_sequences`, each in an order of its own; a step takes the next
    `global_batch_size`, if need be across an epoch's end, and rank r the r-th equal part of them.
    """
    share = global_batch_size // data_size
    position = step * global_batch_size + data_rank * share + np.arange(share, dtype=np.int64)
    epochs, index = np.divmod(position, n_sequences)
    result = np.empty_like(index)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        result[now] = permuted(index[now], n_sequences, seed, int(epoch))
    return tuple(int(i) for i in result)
