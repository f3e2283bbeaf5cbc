"""Numbers for charts: ticks, their labels, and thinning of long series that keeps their extremes."""

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
# Finest first: the first set of mantissas with few enough ticks is used.
_LOG_MANTISSAS = ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,))


def format_number(value: float, digits: int = 4) -> str:
    """Format a number in at most `digits` significant digits: 12.5k, 3.2M, 7B, 0.25, 3e-4."""
    rounded = float(f"{value:.{digits}g}")  # first, so that 999,999 becomes 1M and not 1000k
    magnitude = abs(rounded)
    if 0 < magnitude < 1e-2 or magnitude >= 1e15:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        trimmed = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{trimmed}e{int(exponent)}".replace("-", "−")
    scale, suffix = next(((s, name) for s, name in _SUFFIXES if magnitude >= s), (1.0, ""))
    return f"{rounded / scale:.{max(digits, 3)}g}{suffix}".replace("-", "−")


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: 1 document, 2,000 documents."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Label ticks, each with as many digits as it needs and no more."""
    return [format_number(tick, _digits_needed(tick)) for tick in ticks]


def linear_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Return about `target` multiples of 1, 2 or 5 times a power of ten within [low, high], where low < high."""
    raw = (high - low) / target
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def log_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Return about `target` round numbers within [low, high], evenly spread on a log axis, where 0 < low < high."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in _LOG_MANTISSAS:
        ticks = [float(f"{m}e{decade}") for decade in decades for m in mantissas]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= target + 1:
            break
    if len(ticks) > target + 1:
        return ticks[:: math.ceil(len(ticks) / target)]
    # A range too narrow for round mantissas is almost linear.
    return ticks if len(ticks) >= 3 else linear_ticks(low, high, target)


def downsample(
    x: Sequence[float], y: Sequence[float | None], buckets: int
) -> tuple[Sequence[float], Sequence[float | None]]:
    """Thin a series to the lowest and the highest point of each of `buckets` runs of neighbors.

    Points keep their order; the first and the last point stay. A bucket without any number keeps one None, which a
    chart draws as a gap. A series of at most 2·`buckets` points is returned unchanged.
    """
    count = len(x)
    if count <= 2 * buckets:
        return x, y
    kept = {0, count - 1}
    for bucket in range(buckets):
        indices = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        numbers = [(value, index) for index in indices if (value := y[index]) is not None]
        value_of = itemgetter(0)
        kept |= {min(numbers, key=value_of)[1], max(numbers, key=value_of)[1]} if numbers else {indices[0]}
    order = sorted(kept)
    return [x[index] for index in order], [y[index] for index in order]


def bucket_means(y: Sequence[float | None], buckets: int) -> list[tuple[int, float | None]]:
    """Return the last index and the mean of each of `buckets` runs of neighbors; None for one without any number."""
    ends = [(bucket + 1) * len(y) // buckets for bucket in range(buckets)]
    means = []
    for begin, end in pairwise([0, *ends]):
        numbers = [value for value in y[begin:end] if value is not None]
        means.append((end - 1, sum(numbers) / len(numbers) if numbers else None))
    return means


def _digits_needed(value: float) -> int:
    return next((d for d in range(1, 8) if math.isclose(float(f"{value:.{d}g}"), value, rel_tol=1e-9)), 8)
