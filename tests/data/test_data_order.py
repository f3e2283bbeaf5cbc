"""The order of samples is a well-spread permutation, different for every seed and epoch."""

import numpy as np
import pytest

from fourfold.data.order import hash64, sample_permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 255, 1000, 4097])
def test_bijection(size: int) -> None:
    for seed, epoch in ((0, 0), (1, 0), (0, 1), (-5, 12345)):
        image = sample_permutation(np.arange(size), size, seed, epoch)
        assert sorted(image.tolist()) == list(range(size))


def test_indices_give_the_same_result_alone_or_together() -> None:
    indices = np.array([[5, 0], [999, 5]])
    together = sample_permutation(indices, 1000, 7, np.array([[0, 1], [2, 3]]))
    for place in np.ndindex(2, 2):
        epoch = place[0] * 2 + place[1]
        assert together[place] == sample_permutation(indices[place], 1000, 7, epoch)


def test_seeds_and_epochs_differ() -> None:
    images = [sample_permutation(np.arange(1000), 1000, seed, epoch) for seed in range(3) for epoch in range(3)]
    for number, image in enumerate(images):
        for other in images[:number]:
            # Two random orders agree in one place on average, and hardly ever in 10 places.
            assert (image == other).sum() < 10


def test_the_order_never_changes() -> None:
    """A change here would silently change the order of every resumed run."""
    assert sample_permutation(np.arange(6), 1000, 1234, 0).tolist() == [600, 669, 332, 854, 216, 31]


def test_the_order_is_well_spread() -> None:
    """Over 4,000 epochs, the positions of index 0 are spread evenly over 10 bins. So are the distances between
    neighboring samples."""
    epochs = np.arange(4000)
    first, second = (sample_permutation(np.full(4000, index), 1000, 3, epochs) for index in (0, 1))
    for values in (first, (second - first) % 1000):
        bins = np.bincount(values // 100, minlength=10)
        assert ((bins - 400) ** 2 / 400).sum() < 28  # the chi-squared test at p = 0.001, 9 degrees of freedom


def test_huge_sizes_need_no_memory() -> None:
    size = 10**15
    image = sample_permutation(np.arange(size - 1000, size), size, 0)
    assert len(set(image.tolist())) == 1000
    assert image.max() < size


def test_hash_is_uniform() -> None:
    share = (hash64(np.arange(20_000), 5) < np.uint64(0.02 * 2.0**64)).mean()
    assert 0.017 < share < 0.023
