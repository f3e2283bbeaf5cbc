"""The order of samples: a seeded permutation that needs no memory and does not depend on the grid."""

from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ALL_BITS = 2**64 - 1
_ROUNDS = 6

Bits = TypeVar("Bits", np.uint64, NDArray[np.uint64])


def hash64(values: ArrayLike, seed: int) -> NDArray[np.uint64]:
    """Return a seeded hash of each integer in `values`, in the same shape. The hash is uniform over 64 bits."""
    with np.errstate(over="ignore"):  # NumPy warns when a scalar wraps around, which is intended here.
        key = _mix(np.uint64(seed & _ALL_BITS) + _GOLDEN)
        return np.asarray(_mix(np.asarray(values).astype(np.uint64) * _GOLDEN + key))


def falls_within(numbers: NDArray[np.int64], share: float, seed: int) -> NDArray[np.bool_]:
    """Choose documents at random, given their indices and a seed. Return True for each chosen document.

    Args:
        numbers: Indices of the documents.
        share: Probability that a document is chosen, in [0, 1).
        seed: Seed of the choice.
    """
    return hash64(numbers, seed) < np.uint64(share * 2.0**64)


def sample_permutation(indices: ArrayLike, size: int, seed: int, epoch: ArrayLike = 0) -> NDArray[np.int64]:
    """Apply a seeded permutation of 0 … size-1 to each of `indices`. Every epoch has its own permutation.

    A Feistel network permutes the integers below the next power of two. A result of `size` or more goes through the
    network again until it is below `size` ("cycle walking"). This gives a permutation of [0, size). On average,
    an index takes at most two passes if there are at least two samples.

    Args:
        indices: Integers in [0, size), any shape.
        size: Number of integers to permute, which is the number of samples in an epoch.
        seed: Seed of the permutation.
        epoch: The epoch of all indices, or an array with the epoch of each index.

    Returns:
        The permuted indices, int64 in the shape of `indices`.
    """
    indices = np.asarray(indices, dtype=np.int64)
    assert indices.size == 0 or (indices.min() >= 0 and indices.max() < size), size
    values = indices.astype(np.uint64).reshape(-1)
    keys = np.broadcast_to(hash64(epoch, seed), indices.shape).reshape(-1)
    bits = max(2, (size - 1).bit_length())
    walking = np.arange(values.size)
    while walking.size:
        values[walking] = _feistel(values[walking], keys[walking], bits)
        walking = walking[values[walking] >= size]
    return values.astype(np.int64).reshape(indices.shape)


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """Apply a keyed bijection on [0, 2**bits): in turn, xor each half of the bits with a hash of the other half."""
    low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    low_mask, high_mask = (np.uint64((1 << int(half)) - 1) for half in (low_bits, high_bits))
    low, high = values & low_mask, values >> low_bits
    for number in range(0, _ROUNDS, 2):
        high = high ^ (_round(low, keys, number) & high_mask)
        low = low ^ (_round(high, keys, number + 1) & low_mask)
    return (high << low_bits) | low


def _round(half: NDArray[np.uint64], keys: NDArray[np.uint64], number: int) -> NDArray[np.uint64]:
    # ``half`` has at most 32 bits, so the higher bits are free for the number of the Feistel round.
    return _mix((half + np.uint64(number << 40)) * _GOLDEN + keys)


def _mix(values: Bits) -> Bits:
    """Mix the bits so that every input bit affects every output bit (SplitMix64's finalizer, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
