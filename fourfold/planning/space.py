"""Every layout of a number of GPUs, as arrays, and why the illegal ones are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from fourfold.planning.workload import Workload

AXES = ("x", "y", "z", "dp", "cp", "pp")
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
INTERLEAVES = (1, 2, 3, 4, 6, 8)

REASONS = (
    "legal",
    "x does not divide the heads or the features of keys and values",
    "x does not divide the MLP's width or the vocabulary",
    "y does not divide the hidden size",
    "x · cp does not divide the sequence",
    "x · y does not divide the features of keys and values, or y nothing of the attention",
    "z · dp · micro_batch_size does not divide the global batch",
    "pp · interleave is more than the layers, or does not divide them",
    "interleaving needs micro-batches in multiples of pp",
    "memory: more likely than allowed not to fit",
)
"""Why a point is rejected; a point keeps the index of the first that holds."""
OUT_OF_MEMORY = len(REASONS) - 1


@dataclass(frozen=True)
class Limits:
    """What the search leaves out: axes that may not exceed a size (or must have one), modes, stages."""

    at_most: tuple[tuple[str, int], ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    recomputes: tuple[int, ...] = (0, 1, 2)
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    interleaves: tuple[int, ...] = INTERLEAVES


def all_layouts(base: Workload, gpus: int, limits: Limits) -> Workload:
    """``base`` on every factorisation of ``gpus``, with every micro-batch, zero, recompute and interleave."""
    axes = factorisations(gpus, len(AXES))
    for name, most in limits.at_most:
        axes = axes[axes[:, AXES.index(name)] <= most]
    for name, size in limits.fixed:
        if name in AXES:
            axes = axes[axes[:, AXES.index(name)] == size]
    # Cheap and sweeping refusals first: the rest multiplies what is left. They count in ``rejected_early``.
    columns = {name: axes[:, i] for i, name in enumerate(AXES)}
    columns = _crossed(columns, "micro_batch", np.array(limits.micro_batches))
    columns = _crossed(columns, "interleave", np.array(limits.interleaves))
    columns = _kept(columns, (columns["interleave"] == 1) | (columns["pp"] > 1))
    columns = _crossed(columns, "zero", np.array(limits.zeros))
    copies = columns["dp"] * columns["cp"] > 1
    columns = _kept(columns, (columns["zero"] == min(limits.zeros)) | copies)
    columns = _crossed(columns, "recompute", np.array(limits.recomputes))
    return replace(base, **columns)


def rejections(work: Workload) -> np.ndarray:
    """[n] indices into ``REASONS``; the rules of config/layout.py, for all points at once."""
    keys, heads = work.keys, work.queries / work.head_dim
    reason = np.zeros(np.size(work.x), dtype=np.uint8)
    tokens = work.micro_batch * work.seq
    shared = work.x * work.y
    whole_heads = heads % shared == 0
    by_y = whole_heads | (work.micro_batch % work.y == 0) | ((work.cp == 1) & (work.seq % work.y == 0))
    chunks = work.pp * work.interleave
    rules = (
        (heads % work.x != 0) | (keys % work.x != 0),
        (work.inner % work.x != 0) | (work.vocab % work.x != 0) | (work.positions % work.x != 0),
        (work.hidden % work.y != 0) | (tokens % (work.y * work.cp) != 0),
        (work.seq % (work.x * work.cp) != 0) | ((work.cp > 1) & (work.seq % (2 * work.cp) != 0)),
        ~by_y | (whole_heads & (keys % shared != 0)),
        work.batch % (work.z * work.dp * work.micro_batch) != 0,
        (chunks > work.layers) | ((work.interleave > 1) & (work.layers % chunks != 0)),
        (work.interleave > 1) & (work.micro_batches % work.pp != 0),
    )
    for index, broken in reversed(list(enumerate(rules, start=1))):
        reason[np.broadcast_to(broken, reason.shape)] = index
    return reason


@cache
def factorisations(number: int, parts: int) -> np.ndarray:
    """[n, parts]: every way to write ``number`` as an ordered product of ``parts`` factors."""
    if parts == 1:
        return np.array([[number]])
    rows = []
    for first in (d for d in range(1, number + 1) if number % d == 0):
        rest = factorisations(number // first, parts - 1)
        rows.append(np.column_stack([np.full(len(rest), first), rest]))
    return np.concatenate(rows)


def _crossed(columns: dict[str, np.ndarray], name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Every row with every value of one column more."""
    count = len(next(iter(columns.values())))
    crossed = {key: np.repeat(column, len(values)) for key, column in columns.items()}
    return crossed | {name: np.tile(values, count)}


def _kept(columns: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    return {key: column[mask] for key, column in columns.items()}
