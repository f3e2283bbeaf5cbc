"""Short numbers, and thinning that loses no extreme."""

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
    x = list(range(len(y)))
    thin_x, thin_y = downsample(x, y, 400)
    assert len(thin_x) == len(thin_y) <= 802
    assert thin_x == sorted(set(thin_x))
    assert (thin_x[0], thin_x[-1]) == (0, 99_999)
    assert all(y[at] == value for at, value in zip(thin_x, thin_y, strict=True))
    assert thin_y[thin_x.index(54_321)] == max(y)
    assert thin_y[thin_x.index(77_777)] == min(y)
    for bucket in range(400):  # every bucket keeps its own extremes
        part = y[bucket * 250 : (bucket + 1) * 250]
        assert {min(part), max(part)} <= set(thin_y)


def test_downsampling_keeps_long_gaps():
    y = [1.0] * 1000 + [None] * 1000
    _, thin_y = downsample(list(range(2000)), y, 10)
    assert thin_y.count(None) >= 5
    assert 1.0 in thin_y


def test_a_short_series_is_left_as_it_is():
    x, y = [1, 2, 3], [5.0, None, 6.0]
    assert downsample(x, y, 2) == (x, y)


def test_one_of_a_thing_is_not_a_plural() -> None:
    assert [counted(number, "time") for number in (0, 1, 2000)] == ["0 times", "1 time", "2,000 times"]
