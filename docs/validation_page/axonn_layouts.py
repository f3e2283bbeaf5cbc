"""Reconstruct the layouts that AxoNN's authors tried on a machine.

The authors chose the layouts of their large runs with a communication model (axonn-ai/Megatron-AxoNN 8a4ae241,
examples/comm_model.py and launch_per_comm_model.py). The model tries all powers of two for x, y, z, and dp. It computes
the time of one block's collectives from the bandwidths below, without latency. The authors ran the 20 layouts with the
shortest time and reported the fastest of them.
"""

from __future__ import annotations

from itertools import product

TRIED = 20
LEAST_TENSOR = {
    "gpt-5b": 4, "gpt-10b": 8, "gpt-20b": 16, "gpt-40b": 32, "gpt-60b": 64, "gpt-80b": 64, "gpt-160b": 128,
    "gpt-320b": 256,
}  # fmt: skip
"""The smallest x · y · z that the authors tried for each model. With a smaller x · y · z, the model may not fit into
memory."""
PRODUCTS = ((3, False), (1, True), (4, False), (4, True))
"""For each of a block's four matmuls: the wider of its two widths as a multiple of the hidden size, and whether the
matmul swaps the roles of x and y."""


def tried_layouts(model: str, machine: str, gpus: int, hidden: int, tokens: float, batch: int) -> list[dict[str, int]]:
    """Return the sizes of x, y, z, and dp of the layouts that the authors tried, best first. The result is empty if the
    authors gave no bandwidths for the machine."""
    if machine not in ("frontier", "perlmutter") or model not in LEAST_TENSOR:
        return []
    powers = [1 << i for i in range(gpus.bit_length())]
    found = {}
    for x, y, z in product(powers, repeat=3):
        dp, rest = divmod(gpus, x * y * z)
        if rest == 0 and dp > 0 and x * y * z >= LEAST_TENSOR[model] and batch % (dp * z) == 0:
            found[x, y, z, dp] = sum(
                _seconds(machine, hidden, outputs, tokens / (dp * z), x, y, z, dp, swapped)
                for outputs, swapped in PRODUCTS
            )
    best = sorted(found, key=lambda sizes: found[sizes])[:TRIED]
    return [dict(zip(("x", "y", "z", "dp"), sizes, strict=True)) for sizes in best]


def _seconds(
    machine: str, hidden: int, outputs: int, tokens: float, x: int, y: int, z: int, dp: int, swapped: bool
) -> float:
    """Return the relative time of one matmul's collectives.

    These are sums over x and y in 16 bits, three collectives of weights and their gradients over z in 16 bits, and a
    sum of gradients over dp in 32 bits.
    """
    weights = outputs * hidden**2 / (x * y)
    wide, narrow = 2 * 2 * tokens * outputs * hidden, 2 * 2 * tokens * hidden
    over_x, over_y = (narrow / y, 2 * wide / x) if swapped else (2 * wide / y, narrow / x)
    sent = (_share(x) * over_x, _share(y) * over_y, _share(z) * 6 * weights, _share(dp) * 8 * weights / z)
    seconds, earlier = 0.0, 1
    for size, bytes_sent in zip((x, y, z, dp), sent, strict=True):
        if size > 1:
            seconds += bytes_sent / _bandwidth(machine, earlier, size)
        earlier *= size
    return seconds


def _share(size: int) -> float:
    return (size - 1) / size


def _bandwidth(machine: str, earlier: int, size: int) -> float:
    """Return the bandwidth in GB/s that the authors measured or assumed for a process group. The group has ``size``
    ranks, and the numbers of two neighboring ranks differ by ``earlier``."""
    if machine == "perlmutter":
        if earlier == 1:
            return {2: 76.0, 4: 225.0}.get(size, 80.0)
        return (76.0 if size == 2 else 40.0) if earlier == 2 else 20.0
    if earlier == 1:
        return {2: 129.0, 4: 52.0, 8: 135.0}.get(size, 40.0)
    if earlier == 2:
        return {2: 50.0, 4: 72.0}.get(size, 20.0)
    return (36.0 if size == 2 else 10.0) if earlier == 4 else 5.0
