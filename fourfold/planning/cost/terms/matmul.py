"""Seconds of a matrix product: tiles, waves of tiles, and the depth of the sum.

A kernel gives every processor one tile of the output at a time; a last wave that is not full costs as much as a full
one (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantization). Libraries choose among tile
sizes: the fastest counts, where smaller tiles reuse less of what they load.
"""

from __future__ import annotations

import numpy as np

from fourfold.planning.array_fields import Number

TILES = ((256, 128, 1.0), (128, 128, 0.94), (128, 64, 0.80))
"""Rows, columns, and the share of the best rate: two of the tiles' guide's figures (256×128 and 128×64 on A100)."""

PROLOGUE = 128.0
"""A tile's set-up and write-out take as long as this much depth of the sum: two to four steps of 32 or 64."""


def matmul_seconds(
    m: Number, n: Number, k: Number, *, rate: Number, units: Number, bandwidth: Number, item: Number, groups: Number = 1
) -> Number:
    """Seconds of [m, k] @ [k, n]: rate in FLOP/s of the best shape, units the processors, item bytes of an entry.

    ``groups`` such products are one grouped product, whose tiles share the waves.
    """
    wave = 2.0 * units * (k + PROLOGUE) / rate
    times = [
        np.ceil(groups * np.ceil(m / rows) * np.ceil(n / columns) / units) * (rows * columns / quality)
        for rows, columns, quality in TILES
    ]
    tiled = wave * np.minimum(np.minimum(times[0], times[1]), times[2])
    # A device of one unit is a processor: its blocks fit its caches and are small against any layer.
    computing = np.where(units > 1, tiled, groups * (2.0 * m * n * k / rate))
    moving = groups * ((m * k + k * n + m * n) * item / bandwidth)
    return np.maximum(computing, moving)
