"""Find the fastest layouts that fit into memory. All legal layouts are evaluated, without sampling.

Batch parts are the exception. They only hide communication over the tensor axes x and y. So the search first assumes
that they hide all of it. It evaluates a layout with several parts only if the layout could then be among the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.errors import UserError
from fourfold.planning.array_fields import ArrayFields, unique_rows
from fourfold.planning.cost.activations import block_bytes
from fourfold.planning.cost.block import block_time
from fourfold.planning.cost.memory import p_out_of_memory, peak_memory
from fourfold.planning.cost.step import step_parts
from fourfold.planning.cost.weight_traffic import weight_traffic
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.search.space import (
    CHUNK,
    NO_OFFLOAD,
    OUT_OF_MEMORY,
    REASONS,
    SearchLimits,
    all_grids,
    choices_of,
    refused_grids,
    rejections,
    with_recomputes,
)
from fourfold.planning.workload import Workload

MAX_P_OUT_OF_MEMORY = 0.05
TIED = 1.01
"""Largest ratio of two step times that are treated as a tie. The planner's error is far larger
(docs/planner_figures.json)."""
HOPELESS = 0.9
"""If a layout runs out of memory with at least this probability, it is not evaluated with more batch parts."""
BLOCK_KEY = ("x", "y", "cp", "micro_batch_size", "cp_method", "batch_parts", "ep")
"""Fields that the time of one block depends on within a search."""
TRAFFIC_KEY = ("x", "y", "z", "dp", "cp", "pp", "ep", "zero")
"""Fields that the traffic of weights and gradients depends on."""
RANKED = 400
"""Number of fastest layouts that the search is sure to find, over all numbers of batch parts."""
LAYER_PARTS = ("compute", "recompute", "x", "y", "z", "cp", "ep", "launch")
"""Parts of a step that can get shorter if batch parts hide communication over x and y. (The bubble can get shorter
too.)"""
COPIES = 0.95
"""If each batch part has one sequence, tokens need not be copied before and after collectives. Without these copies, a
step takes at least this fraction of its time."""


@dataclass(frozen=True)
class SearchScores(ArrayFields):
    """Scores of the points of a search, each an array [n].

    - seconds: the time of a step. Infinite if the point is illegal.
    - least: a lower bound on the seconds, whatever the number of batch parts.
    - memory: the peak bytes of the rank that needs the most memory.
    - p_oom: the probability of running out of memory.
    - reason: the index of the reason for a refusal.
    """

    seconds: np.ndarray
    least: np.ndarray
    memory: np.ndarray
    p_oom: np.ndarray
    reason: np.ndarray

    @property
    def fits(self) -> np.ndarray:
        """Return the indices of the points that are legal and fit into memory."""
        return np.flatnonzero(self.reason == 0)


@dataclass(frozen=True)
class Found(SearchScores):
    """All points of a search, with their scores.

    - work: the points.
    - order: the legal points, fastest first. Ties are ordered by P(OOM) (see ``ranking``).
    - crossed: the number of points in the first round. Candidates with more batch parts come after these.
    - refused: for each reason, the number of layouts that are illegal with every recompute mode. They are not among the
      points.
    - batch_parts: the numbers of parts that were tried.
    - seconds_taken: wall time.
    """

    work: Workload
    order: np.ndarray
    crossed: int
    refused: np.ndarray
    batch_parts: tuple[int, ...]
    seconds_taken: float

    @property
    def evaluated(self) -> int:
        """Return the number of evaluated layouts."""
        return len(self.seconds) + int(self.refused.sum())

    def point(self, index: int | np.ndarray) -> Workload:
        """Return the layout at an index."""
        return self.work.point(index)

    def rejected(self) -> dict[str, int]:
        """Count the layouts that each reason has refused."""
        counts = np.bincount(self.reason, minlength=len(REASONS)) + self.refused
        return {REASONS[i]: int(n) for i, n in enumerate(counts) if n and i}


def search(
    base: Workload, machine: Machine, constants: Constants, gpus: int, limits: SearchLimits | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Found:  # fmt: skip
    """Evaluate every layout of ``base`` on ``gpus`` devices.

    Args:
        watch: Called with the number of finished layouts and the number of all layouts.

    Raises:
        UserError: The limits leave no layout.
    """
    begin = time.perf_counter()
    limits = limits or SearchLimits()
    grids = all_grids(base, gpus, limits)
    if not len(grids["x"]):
        raise UserError(f"{limits.written}: no layout of {gpus} GPUs is within these limits; leave one out")
    reason, layouts = refused_grids(base, grids, limits, machine)
    refused = np.bincount(reason, layouts * (reason > 0), len(REASONS)).astype(int)
    choices = choices_of(base, {name: column[reason == 0] for name, column in grids.items()}, limits)
    reason = rejections(choices, machine)
    refused[1:] += len(limits.recomputes) * np.bincount(reason, minlength=len(REASONS))[1:]
    work = with_recomputes(choices.take(reason == 0), limits)
    crossed = np.size(work.layout.x)
    unknown = np.asarray(work.layout.offload, bool) & (machine.host == 0)
    scores = score(work, machine, constants, np.where(unknown, NO_OFFLOAD, 0), watch)
    candidates = _candidates(work, scores)
    if len(limits.batch_parts) > 1 and len(candidates):
        more = with_batch_parts(work.take(candidates), limits.batch_parts[1:])
        scores = scores.followed_by(score(more, machine, constants, rejections(more, machine)))
        work = work.followed_by(more)
    return Found(
        **vars(scores), work=work, order=ranking(scores), crossed=crossed, refused=refused,
        batch_parts=limits.batch_parts, seconds_taken=time.perf_counter() - begin,
    )  # fmt: skip


def ranking(scores: SearchScores) -> np.ndarray:
    """Return the points that fit into memory, fastest first.

    Starting with the fastest point, times within a factor of ``TIED`` form a band and count as equal.

    Within a band, layouts are sorted by P(OOM), rounded to a whole percentage, and then by time.
    """
    seconds, p_oom = scores.seconds[scores.fits], scores.p_oom[scores.fits]
    bands = np.floor(np.log(seconds / seconds.min(initial=np.inf)) / np.log(TIED))
    order: np.ndarray = scores.fits[np.lexsort((seconds, np.rint(100 * p_oom), bands))]
    return order


def score(
    work: Workload, machine: Machine, constants: Constants, reason: np.ndarray,
    watch: Callable[[int, int], None] | None = None,
) -> SearchScores:  # fmt: skip
    """Evaluate the points that no earlier ``reason`` refuses (``space.rejections``), and refuse points that do not fit
    into memory."""
    count = np.size(work.layout.x)
    scores = SearchScores(
        seconds=np.full(count, np.inf),
        least=np.full(count, np.inf, dtype=np.float32),
        memory=np.full(count, np.nan),
        p_oom=np.full(count, np.nan),
        reason=reason.astype(np.uint8),
    )
    legal = np.flatnonzero(reason == 0)
    for begin_at in range(0, len(legal), CHUNK):
        index = legal[begin_at : begin_at + CHUNK]
        part = work.take(index).with_float_arrays()
        scores.memory[index], scores.seconds[index], scores.least[index] = evaluate(part, machine, constants)
        scores.p_oom[index] = p_out_of_memory(scores.memory[index], part, machine)
        if watch is not None:
            watch(begin_at + len(index), len(legal))
    scores.reason[scores.p_oom > MAX_P_OUT_OF_MEMORY] = OUT_OF_MEMORY
    return scores


def evaluate(work: Workload, machine: Machine, constants: Constants) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays with one entry per point: the peak bytes of the rank that needs the most memory, the seconds
    of a step, and a lower bound on the seconds, whatever the number of batch parts.

    Many points have the same block times and weight traffic, so each distinct one is computed only once.

    For the lower bound, batch parts are assumed to hide all communication over x and y, and to avoid copies of tokens
    (``COPIES``).
    """
    first, back = unique_rows([getattr(work.layout, name) for name in BLOCK_KEY])
    blocks = work.take(first)
    memory = peak_memory(work, machine, block_bytes(blocks).take(back))
    block = block_time(blocks, machine, constants).take(back)
    first, of_grid = unique_rows([getattr(work.layout, name) for name in TRAFFIC_KEY])
    traffic = weight_traffic(work.take(first), machine, constants).take(of_grid)
    parts = step_parts(work, machine, constants, block, traffic)
    seconds, of_layers = sum(parts.values()), sum(parts[name] for name in LAYER_PARTS)
    least = COPIES * seconds * (1 - (parts["x"] + parts["y"]) / of_layers)
    each = back.shape
    return np.broadcast_to(memory, each), np.broadcast_to(seconds, each), np.broadcast_to(least, each)


def _candidates(work: Workload, scores: SearchScores) -> np.ndarray:
    """Return the indices of points that, with more batch parts, may be among the ``RANKED`` fastest points.

    These include points that do not fit so far, because they may need less memory with more batch parts.
    """
    may_fit = (scores.reason == 0) | ((scores.reason == OUT_OF_MEMORY) & (scores.p_oom < HOPELESS))
    limit = np.inf
    if len(scores.fits):
        ranked = min(RANKED, len(scores.fits)) - 1
        limit = np.partition(scores.seconds[scores.fits], ranked)[ranked]
    is_split = np.asarray(work.layout.x * work.layout.y) > 1
    candidates: np.ndarray = np.flatnonzero(may_fit & is_split & (scores.least <= limit))
    return candidates


def with_batch_parts(work: Workload, batch_parts: Sequence[int]) -> Workload:
    """Return every point with each number of batch parts."""
    count = np.size(work.layout.x)
    repeated = work.map_arrays(lambda array: np.tile(array, len(batch_parts)))
    each: Workload = repeated.but(batch_parts=np.repeat(np.array(batch_parts, dtype=np.int32), count))
    return each
