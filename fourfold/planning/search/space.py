"""Every layout of a number of GPUs, as arrays, and why the illegal ones are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from fourfold.config.layout import FLOAT8_MULTIPLE
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import CP_METHODS, SCHEDULES, Workload

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
    columns = _crossed(columns, {"cp_method": [CP_METHODS.index(name) for name in limits.contexts]})
    columns = _kept(columns, (columns["cp"] > 1) | (columns["cp_method"] == CP_METHODS.index(limits.contexts[0])))
    columns = _crossed(columns, {"zero": limits.zeros})
    copies = columns["dp"] * columns["cp"] > 1
    columns = _kept(columns, (columns["zero"] == min(limits.zeros)) | copies)
    modes, everies, offloads = zip(*limits.recomputes, strict=True)
    columns = _crossed(columns, {"recompute": modes, "recompute_every": everies, "offload": offloads})
    return base.but(**columns, layers_per_stage=None)


def rejections(work: Workload, machine: Machine) -> np.ndarray:
    """[n] indices into ``REASONS``; the rules of config/layout.py, for all points at once."""
    model, layout, step = work.model, work.layout, work.step
    keys, heads = model.keys, model.queries // model.head_dim
    reason = np.zeros(np.size(layout.x), dtype=np.uint8)
    tokens = np.int64(step.seq) * layout.micro_batch
    shared = layout.x * layout.y
    whole_heads = heads % shared == 0
    by_y = whole_heads | (layout.micro_batch % layout.y == 0) | ((layout.cp == 1) & (step.seq % layout.y == 0))
    chunks = layout.pp * layout.interleave
    interleaved = np.isin(layout.schedule, [SCHEDULES.index(n) for n in ("Interleaved1F1B", "InterleavedZeroBubble")])
    rounds = np.maximum(work.micro_batches // layout.pp, 1)
    sharing = np.where(whole_heads, shared, layout.x) * layout.cp
    divides = (heads % sharing == 0) & (keys % (sharing * model.head_dim) == 0)
    odd: np.ndarray | bool = False
    if np.any(np.equal(step.bits, 8)):
        sizes = (
            model.hidden // layout.y,
            *(size // layout.x for size in (model.queries, keys, model.inner)),
            tokens // layout.cp,
        )
        odd = np.any([np.broadcast_to(size % FLOAT8_MULTIPLE != 0, reason.shape) for size in sizes], axis=0)
    rules = (
        (heads % layout.x != 0) | (keys % layout.x != 0),
        (model.inner % layout.x != 0) | (model.vocab % layout.x != 0) | (model.positions % layout.x != 0),
        (model.hidden % layout.y != 0) | (tokens % (layout.y * layout.cp) != 0),
        (step.seq % (layout.x * layout.cp) != 0) | ((layout.cp > 1) & (step.seq % (2 * layout.cp) != 0)),
        ~by_y | (whole_heads & (keys % shared != 0)),
        step.batch % np.multiply(layout.z * layout.dp, layout.micro_batch, dtype=np.int64) != 0,
        chunks > model.layers,
        interleaved & (work.micro_batches % rounds != 0),
        layout.split_backward & ((layout.z > 1) | (layout.zero > 1)),
        (layout.pp > 1) & (layout.schedule == SCHEDULES.index("DualPipeV")) & (work.micro_batches < 2 * layout.pp),
        (layout.cp > 1) & (layout.cp_method == CP_METHODS.index("ulysses")) & ~divides,
        np.asarray(layout.offload, bool) & (machine.host == 0),
        np.equal(step.bits, 8) & odd,
    )
    for index, broken in reversed(list(enumerate(rules, start=1))):
        reason[np.broadcast_to(broken, reason.shape)] = index
    return reason


def refusal(work: Workload, machine: Machine) -> str:
    """Why one layout is illegal; empty where it is not."""
    numbers = {name: np.array([v]) for name, v in vars(work.layout).items() if isinstance(v, int | float | np.generic)}
    reason = int(rejections(work.but(**numbers), machine)[0])
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
