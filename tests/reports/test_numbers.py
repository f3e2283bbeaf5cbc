"""Ticks, their labels, and thinning that loses no extreme."""

import random

import pytest

from fourfold.reports.numbers import counted, downsample, format_number, format_ticks, linear_ticks, log_ticks


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


def test_linear_ticks_are_round_and_inside():
    assert linear_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert linear_ticks(0.13, 0.57) == [0.2, 0.3, 0.4, 0.5]
    assert linear_ticks(-3e-4, 3e-4, 3) == [-2e-4, 0, 2e-4]
    assert linear_ticks(0, 1_638_400) == [0, 500_000, 1_000_000, 1_500_000]


def test_log_ticks_fit_their_range():
    assert log_ticks(2.6, 11) == [3, 4, 5, 6, 8, 10]
    assert log_ticks(0.4, 40) == [0.5, 1, 2, 5, 10, 20]
    assert log_ticks(3.1, 3.3) == [3.1, 3.15, 3.2, 3.25, 3.3]
    assert 3 <= len(log_ticks(1e-12, 1e12)) <= 6


@pytest.mark.parametrize("seed", range(50))
def test_ticks_are_few_inside_and_told_apart_by_their_labels(seed):
    generator = random.Random(seed)
    low = 10 ** generator.uniform(-8, 8)
    high = low * (1 + 10 ** generator.uniform(-3, 4))
    for ticks in (linear_ticks(low, high), log_ticks(low, high)):
        assert 1 <= len(ticks) <= 7
        assert all(low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) for tick in ticks)
        assert ticks == sorted(set(ticks))
        assert len(set(format_ticks(ticks))) == len(ticks)


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
    for bucket in range(400):  # not only the extremes of the whole
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
