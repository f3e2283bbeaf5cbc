"""Format numbers for texts and charts, and thin long series without losing their extremes."""

from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def format_number(value: float) -> str:
    """Format a number with at most four significant digits, such as 12.5k, 3.2M, 7B, 0.25, or 3e−4."""
    rounded = float(f"{value:.4g}")  # Round first. Otherwise 999,999 would become 1000k instead of 1M.
    magnitude = abs(rounded)
    if 0 < magnitude < 1e-2 or magnitude >= 1e15:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", "−")
    scale, suffix = next(((s, name) for s, name in _SUFFIXES if magnitude >= s), (1.0, ""))
    return f"{rounded / scale:.4g}{suffix}".replace("-", "−")


def counted(number: int, noun: str) -> str:
    """Format a count with its noun in the singular or plural: 1 document, 2,000 documents."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def downsample(y: Sequence[float | None], buckets: int) -> Sequence[int]:
    """Choose some points of a long series, so that a chart of these points still shows all extremes. Divide the series
    into ``buckets`` groups of neighboring points. Return the indices of the lowest and of the highest point of each
    group, in order.

    The indices of the first and the last point are always included. From a group that has only None, the result has the
    index of one None, which a chart draws as a gap. For a series of at most 2·``buckets`` points, return all indices.
    """
    count = len(y)
    if count <= 2 * buckets:
        return range(count)
    kept = {0, count - 1}
    for bucket in range(buckets):
        indices = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        numbers = [(value, index) for index in indices if (value := y[index]) is not None]
        value_of = itemgetter(0)
        kept |= {min(numbers, key=value_of)[1], max(numbers, key=value_of)[1]} if numbers else {indices[0]}
    return sorted(kept)


def bucket_means(y: Sequence[float | None], buckets: int) -> list[tuple[int, float | None]]:
    """Divide a series into ``buckets`` groups of neighboring points. For each group, return the index of its last
    point, and the mean of its numbers.

    The mean of a group that has only None is None.
    """
    ends = [(bucket + 1) * len(y) // buckets for bucket in range(buckets)]
    means = []
    for begin, end in pairwise([0, *ends]):
        numbers = [value for value in y[begin:end] if value is not None]
        means.append((end - 1, sum(numbers) / len(numbers) if numbers else None))
    return means
