"""Short forms of numbers, and thinning of curves that keeps every minimum and maximum."""

import random

import pytest

from fourfold.reports.numbers import counted, downsample, format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (12, "12"),
        (999, "999"),
        (1000, "1k"),
        (12500, "12.5k"),
        (999_999, "1M"),
        (3.2e6, "3.2M"),
        (7e9, "7B"),
        (1.5e13, "15T"),
        (3e-4, "3e−4"),
        (1.25e-5, "1.25e−5"),
        (-20, "−20"),
        (1e15, "1e15"),
    ],
)
def test_numbers_are_short(value, text):
    assert format_number(value) == text


def test_downsampling_keeps_extremes_order_and_ends():
    generator = random.Random(0)
    y = [generator.gauss(0, 1) for _ in range(100_000)]
    y[54_321], y[77_777] = 100.0, -100.0
    kept = downsample(y, 400)
    assert len(kept) <= 802
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, 99_999)
    assert {54_321, 77_777} <= set(kept)
    thin_y = [y[index] for index in kept]
    for bucket in range(400):  # the smallest and the largest value of each bucket stay
        part = y[bucket * 250 : (bucket + 1) * 250]
        assert {min(part), max(part)} <= set(thin_y)


def test_downsampling_keeps_long_gaps():
    y = [1.0] * 1000 + [None] * 1000
    thin_y = [y[index] for index in downsample(y, 10)]
    assert thin_y.count(None) >= 5
    assert 1.0 in thin_y


def test_a_short_series_is_left_as_it_is():
    assert list(downsample([5.0, None, 6.0], 2)) == [0, 1, 2]


def test_a_count_of_one_is_singular() -> None:
    assert [counted(number, "time") for number in (0, 1, 2000)] == ["0 times", "1 time", "2,000 times"]
