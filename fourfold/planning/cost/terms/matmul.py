"""Compute the time of a matmul and of a linear layer, from the number of output tiles and the inner dimension.

A kernel computes the output in *waves*: in each wave, every processor computes one tile of the output. If the last wave
is not full, it takes as long as a full wave (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave
quantization). Libraries choose the fastest tile size for each shape. Smaller tiles reach a lower rate, because they
reuse less of the data that they load.
"""

import numpy as np

from fourfold.planning.array_fields import Number
from fourfold.planning.cost.rates import Rates

TILES = ((256, 128, 1.0), (128, 128, 0.94), (128, 64, 0.80))
"""Tile sizes: rows, columns, and the fraction of the best rate that they reach. The fractions for 256×128 and 128×64
come from the guide's measurements on an A100."""

PROLOGUE = 128.0
"""The time to set up a tile and to write its result, in steps along the inner dimension. A kernel needs the time of two
to four iterations for this, with 32 or 64 steps each."""


def matmul_seconds(
    m: Number, n: Number, k: Number, *, rate: Number, units: Number, bandwidth: Number, item: Number, groups: Number = 1
) -> Number:
    """Return the seconds of [m, k] @ [k, n].

    If ``groups`` is above 1, one kernel computes this number of such matmuls (a grouped matmul), and their tiles share
    the waves.

    Args:
        m: Number of rows of the output.
        n: Number of columns of the output.
        k: Inner dimension.
        rate: FLOP/s that the best shape reaches.
        units: Number of processors of the device.
        bandwidth: Memory bandwidth in bytes per second.
        item: Number of bytes per entry.
        groups: Number of matmuls in the group.
    """
    wave = 2.0 * units * (k + PROLOGUE) / rate
    times = [
        np.ceil(groups * np.ceil(m / rows) * np.ceil(n / columns) / units) * (rows * columns / quality)
        for rows, columns, quality in TILES
    ]
    tiled = wave * np.minimum(np.minimum(times[0], times[1]), times[2])
    # One unit means a CPU. Its tiles are so small that partly filled waves do not matter.
    computing = np.where(units > 1, tiled, groups * (2.0 * m * n * k / rate))
    moving = groups * ((m * k + k * n + m * n) * item / bandwidth)
    return np.maximum(computing, moving)


def linear_seconds(
    rows: Number, inner: Number, out: Number, item: Number, rates: Rates, rate: Number, groups: Number = 1
) -> tuple[Number, Number, Number]:
    """Return the seconds of a linear layer's three matmuls: forward, input gradient, and weight gradient.

    Args:
        rows: Number of rows of the input.
        inner: Number of input features.
        out: Number of output features.
        item: Number of bytes per entry.
        rates: The rates of the step on the machine.
        rate: FLOP/s that the best shape reaches, with the fastest memory layout of the operands.
        groups: Number of layers, each with ``rows`` rows. Above 1, they run as one grouped matmul.
    """
    how = {"units": rates.units, "bandwidth": rates.bandwidth, "item": item, "groups": groups}
    return (
        matmul_seconds(rows, out, inner, rate=rates.nt * rate, **how),
        matmul_seconds(rows, inner, out, rate=rates.nn * rate, **how),
        matmul_seconds(out, inner, rows, rate=rates.tn * rate, **how),
    )
