"""The order of samples: a seeded bijection that needs no memory and knows nothing of the grid."""

from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ALL_BITS = 2**64 - 1
_ROUNDS = 6

Bits = TypeVar("Bits", np.uint64, NDArray[np.uint64])


def hash64(values: ArrayLike, seed: int) -> NDArray[np.uint64]:
    """Return a seeded 64-bit hash of each integer in `values` (any shape, kept); uniform over all 64 bits."""
    with np.errstate(over="ignore"):  # numpy warns when a scalar wraps round, which is what a hash does
        key = _mix(np.uint64(seed & _ALL_BITS) + _GOLDEN)
        return np.asarray(_mix(np.asarray(values).astype(np.uint64) * _GOLDEN + key))


def sample_permutation(indices: ArrayLike, size: int, seed: int, epoch: ArrayLike = 0) -> NDArray[np.int64]:
    """Apply a seeded permutation of 0 … size-1 to each of `indices`; every epoch has another permutation.

    `indices` [...] int, each in [0, size); `epoch` an int or one per index. Returns int64 of the shape of `indices`.

    A Feistel network permutes the next power of two, and is applied again to a result of `size` or more
    ("cycle walking", under two rounds on average), which makes a bijection on [0, size).
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
    """A keyed bijection on [0, 2**bits): each half in turn is xored with a hash of the other."""
    low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    low_mask, high_mask = (np.uint64((1 << int(half)) - 1) for half in (low_bits, high_bits))
    low, high = values & low_mask, values >> low_bits
    for number in range(0, _ROUNDS, 2):
        high = high ^ (_round(low, keys, number) & high_mask)
        low = low ^ (_round(high, keys, number + 1) & low_mask)
    return (high << low_bits) | low


def _round(half: NDArray[np.uint64], keys: NDArray[np.uint64], number: int) -> NDArray[np.uint64]:
    # A half has at most 32 bits, so the round's number never meets it.
    return _mix((half + np.uint64(number << 40)) * _GOLDEN + keys)


def _mix(values: Bits) -> Bits:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
