"""Every layout of a number of GPUs, as arrays, and why the illegal ones are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from fourfold.config.layout import FLOAT8_MULTIPLE
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import CONTEXTS, SCHEDULES, Workload

AXES = ("x", "y", "z", "dp", "cp", "pp")
MOST_GPUS = 1 << 24
"""Beyond, layouts do not fit the search's 32 bits."""
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PIPELINES = (
    ("1F1B", 1),
    *(("Interleaved1F1B", chunks) for chunks in (2, 3, 4, 6, 8)),
    *(("InterleavedZeroBubble", chunks) for chunks in (2, 4)),
    ("ZBVZeroBubble", 2),
)
"""Schedules with the stages of a rank. GPipe and LoopedBFS take as long as 1F1B and hold more, DualPipeV like the V of
the zero bubble: these are predicted where a run file has them."""
RECOMPUTES = ((0, 1, False), (1, 1, False), (2, 1, False), (2, 2, False), (2, 4, False), (2, 1, True))
"""Mode (an index into ``workload.RECOMPUTE``), every, offload."""

REASONS = (
    "legal",
    "x does not divide the heads or the features of keys and values",
    "x does not divide the MLP's width or the vocabulary",
    "y does not divide the hidden size",
    "x · cp does not divide the sequence",
    "x · y does not divide the features of keys and values, or y nothing of the attention",
    "z · dp · micro_batch_size does not divide the global batch",
    "pp · stages_per_rank is more than the layers",
    "interleaved schedules need whole rounds of pp micro-batches",
    "schedules that compute weight gradients apart need z = 1 and zero 0 or 1",
    "DualPipeV needs 2 · pp micro-batches",
    "ulysses needs the heads of queries and of keys to divide over cp · x · y",
    "offload: the machine file does not say how fast the host's memory is",
    "float8 needs multiples of 16 features and tokens on every rank",
    "memory: more likely than allowed not to fit",
)
"""Why a point is rejected; a point keeps the index of the first that holds."""
OUT_OF_MEMORY = len(REASONS) - 1


@dataclass(frozen=True)
class Limits:
    """What the search leaves out: axes that may not exceed a size (or must have one), modes, schedules."""

    at_most: tuple[tuple[str, int], ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    recomputes: tuple[tuple[int, int, bool], ...] = RECOMPUTES
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    pipelines: tuple[tuple[str, int], ...] = PIPELINES
    contexts: tuple[str, ...] = ("ring", "ulysses")


def all_layouts(base: Workload, gpus: int, limits: Limits) -> Workload:
    """``base`` on every factorisation of ``gpus``, with every micro-batch, schedule, zero, recompute, way of cp."""
    axes = factorisations(gpus, len(AXES)).astype(np.int32)
    for name, most in limits.at_most:
        axes = axes[axes[:, AXES.index(name)] <= most]
    for name, size in limits.fixed:
        axes = axes[axes[:, AXES.index(name)] == size]
    columns = {name: axes[:, i] for i, name in enumerate(AXES)}
    columns = _crossed(columns, {"micro_batch": limits.micro_batches})
    pipelines = [(SCHEDULES.index(schedule), chunks) for schedule, chunks in limits.pipelines]
    columns = _crossed(columns, {"schedule": [s for s, _ in pipelines], "interleave": [c for _, c in pipelines]})
    # What a knob does nothing to is one point.
    first = (columns["schedule"] == pipelines[0][0]) & (columns["interleave"] == pipelines[0][1])
    columns = _kept(columns, (columns["pp"] > 1) | first)
    alone = columns["pp"] == 1
    columns["schedule"][alone], columns["interleave"][alone] = 0, 1
    columns = _crossed(columns, {"context": [CONTEXTS.index(name) for name in limits.contexts]})
    columns = _kept(columns, (columns["cp"] > 1) | (columns["context"] == CONTEXTS.index(limits.contexts[0])))
    columns = _crossed(columns, {"zero": limits.zeros})
    copies = columns["dp"] * columns["cp"] > 1
    columns = _kept(columns, (columns["zero"] == min(limits.zeros)) | copies)
    modes, everies, offloads = zip(*limits.recomputes, strict=True)
    columns = _crossed(columns, {"recompute": modes, "every": everies, "offload": offloads})
    return replace(base, **columns, layers_per_stage=None)


def rejections(work: Workload, machine: Machine) -> np.ndarray:
    """[n] indices into ``REASONS``; the rules of config/layout.py, for all points at once."""
    keys, heads = work.keys, work.queries // work.head_dim
    reason = np.zeros(np.size(work.x), dtype=np.uint8)
    tokens = np.int64(work.seq) * work.micro_batch
    shared = work.x * work.y
    whole_heads = heads % shared == 0
    by_y = whole_heads | (work.micro_batch % work.y == 0) | ((work.cp == 1) & (work.seq % work.y == 0))
    chunks = work.pp * work.interleave
    interleaved = np.isin(work.schedule, [SCHEDULES.index(n) for n in ("Interleaved1F1B", "InterleavedZeroBubble")])
    rounds = np.maximum(work.micro_batches // work.pp, 1)
    sharing = np.where(whole_heads, shared, work.x) * work.cp
    divides = (heads % sharing == 0) & (keys % (sharing * work.head_dim) == 0)
    odd: np.ndarray | bool = False
    if np.any(np.equal(work.bits, 8)):
        sizes = (work.hidden // work.y, work.queries // work.x, keys // work.x, work.inner // work.x, tokens // work.cp)
        odd = np.any([np.broadcast_to(size % FLOAT8_MULTIPLE != 0, reason.shape) for size in sizes], axis=0)
    rules = (
        (heads % work.x != 0) | (keys % work.x != 0),
        (work.inner % work.x != 0) | (work.vocab % work.x != 0) | (work.positions % work.x != 0),
        (work.hidden % work.y != 0) | (tokens % (work.y * work.cp) != 0),
        (work.seq % (work.x * work.cp) != 0) | ((work.cp > 1) & (work.seq % (2 * work.cp) != 0)),
        ~by_y | (whole_heads & (keys % shared != 0)),
        work.batch % np.multiply(work.z * work.dp, work.micro_batch, dtype=np.int64) != 0,
        chunks > work.layers,
        interleaved & (work.micro_batches % rounds != 0),
        work.split_backward & ((work.z > 1) | (work.zero > 1)),
        (work.pp > 1) & (work.schedule == SCHEDULES.index("DualPipeV")) & (work.micro_batches < 2 * work.pp),
        (work.cp > 1) & (work.context == CONTEXTS.index("ulysses")) & ~divides,
        np.asarray(work.offload, bool) & (machine.host == 0),
        np.equal(work.bits, 8) & odd,
    )
    for index, broken in reversed(list(enumerate(rules, start=1))):
        reason[np.broadcast_to(broken, reason.shape)] = index
    return reason


def refusal(work: Workload, machine: Machine) -> str:
    """Why one layout is illegal; empty where it is not."""
    numbers = {name: np.array([v]) for name, v in vars(work).items() if isinstance(v, int | float | np.generic)}
    reason = int(rejections(replace(work, **numbers), machine)[0])
    return REASONS[reason] if reason else ""


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


def _crossed(columns: dict[str, np.ndarray], more: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Every row with every row of some columns more."""
    count, times = len(next(iter(columns.values()))), len(next(iter(more.values())))
    crossed = {key: np.repeat(column, times) for key, column in columns.items()}
    for key, values in more.items():
        narrow = bool if isinstance(values[0], bool) else np.int32
        crossed[key] = np.tile(np.array(values, dtype=narrow), count)
    return crossed


def _kept(columns: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    return {key: column[mask] for key, column in columns.items()}
