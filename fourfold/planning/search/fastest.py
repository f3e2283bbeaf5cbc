"""Find the fastest layouts that fit into memory. The search evaluates all legal layouts, without sampling.

The number of batch parts (``overlap.batch_parts``, the parts of a micro-batch that take turns) is the exception. Batch
parts only hide communication over the tensor axes x and y, so the step time without this communication is a lower bound
for any number of parts. The search tries several parts only for layouts that could be among the fastest by this bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.errors import UserError
from fourfold.planning.array_fields import ArrayFields, unique_rows
from fourfold.planning.cost.block_memory import block_bytes
from fourfold.planning.cost.block_time import block_time
from fourfold.planning.cost.memory import peak_memory
from fourfold.planning.cost.out_of_memory import p_out_of_memory
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
"""A layout fits if it runs out of memory with at most this probability."""
TIED = 1.01
"""Step times within this ratio count as a tie. The planner's error is far larger (docs/planner_figures.json)."""
HOPELESS = 0.9
"""A layout that runs out of memory with at least this probability is not tried with more batch parts."""
BLOCK_KEY = ("x", "y", "cp", "micro_batch_size", "cp_method", "batch_parts", "ep", "split_backward")
"""Fields of a layout that change the time or memory of one block. All other inputs are constant within a search."""
TRAFFIC_KEY = ("x", "y", "z", "dp", "cp", "pp", "ep", "zero")
"""Fields of a layout that change the traffic of weights and gradients. All other inputs are constant within a
search."""
RANKED = 400
"""The search is certain to find this many of the fastest layouts. Layouts below this rank may be missing, if they need
several batch parts to be fast."""
LAYER_PARTS = ("compute", "recompute", "x", "y", "z", "cp", "ep", "launch")
"""Parts of a step that make up the time of the layers. Batch parts can save at most the fraction of this time that x
and y take. (They can shorten the pipeline's bubble by the same fraction.)"""
COPIES = 0.95
"""If each batch part has one sequence, tokens need not be copied before and after collectives. Without these copies, a
step still takes at least this fraction of its time."""


@dataclass(frozen=True)
class SearchScores(ArrayFields):
    """Scores of the n points of a search. Each field is an array [n]. A *point* is one layout.

    - seconds: the step time. Infinite if the point is illegal.
    - least: a lower bound on the step time with any number of batch parts, in seconds.
    - memory: the peak bytes of the rank that needs the most memory.
    - p_oom: the probability of running out of memory.
    - reason: why the point is refused, as an index into ``space.REASONS``. 0 if it is legal and fits.
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
    - order: the points that are legal and fit, fastest first. Ties are ordered by P(OOM) (see ``ranking``).
    - first_round: the number of points in the first round, which tries one number of batch parts. The points with more
      batch parts come after these points.
    - refused: for each reason, the number of layouts that were dropped before they became points, because they are
      illegal with every recompute mode.
    - batch_parts: the numbers of batch parts that were tried.
    - seconds_taken: wall time of the search, in seconds.
    """

    work: Workload
    order: np.ndarray
    first_round: int
    refused: np.ndarray
    batch_parts: tuple[int, ...]
    seconds_taken: float

    @property
    def evaluated(self) -> int:
        """Return the number of layouts that the search considered, including illegal ones."""
        return len(self.seconds) + int(self.refused.sum())

    def point(self, index: int | np.ndarray) -> Workload:
        """Return the workload of the point at ``index``."""
        return self.work.point(index)

    def rejected(self) -> dict[str, int]:
        """Return the number of refused layouts by reason."""
        counts = np.bincount(self.reason, minlength=len(REASONS)) + self.refused
        return {REASONS[i]: int(n) for i, n in enumerate(counts) if n and i}


def search(
    base: Workload, machine: Machine, constants: Constants, gpus: int, limits: SearchLimits | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Found:  # fmt: skip
    """Evaluate all layouts of ``base`` on ``gpus`` GPUs.

    Args:
        base: The model and its step.
        machine: The machine.
        constants: The planner's constants for the machine.
        gpus: Number of GPUs.
        limits: Limits of the search.
        watch: Called during the first round, with the number of evaluated layouts and the number of legal layouts.

    Raises:
        UserError: No layout is within the limits, or ep is limited for a model without experts.
    """
    begin = time.perf_counter()
    limits = limits or SearchLimits()
    grids = all_grids(base, gpus, limits)
    if not len(grids["x"]):
        raise UserError(f"{limits.written}: no layout of {gpus} GPUs is within these limits; leave a limit out")
    reason, layouts = refused_grids(base, grids, limits, machine)
    refused = np.bincount(reason, layouts * (reason > 0), len(REASONS)).astype(int)
    choices = choices_of(base, {name: column[reason == 0] for name, column in grids.items()}, limits)
    reason = rejections(choices, machine)
    refused[1:] += len(limits.recomputes) * np.bincount(reason, minlength=len(REASONS))[1:]
    work = with_recomputes(choices.take(reason == 0), limits)
    first_round = np.size(work.layout.x)
    unknown = np.asarray(work.layout.offload, bool) & (machine.host == 0)
    scores = score(work, machine, constants, np.where(unknown, NO_OFFLOAD, 0), watch)
    candidates = _candidates(work, scores)
    if len(limits.batch_parts) > 1 and len(candidates):
        more = with_batch_parts(work.take(candidates), limits.batch_parts[1:])
        scores = scores.followed_by(score(more, machine, constants, rejections(more, machine)))
        work = work.followed_by(more)
    return Found(
        **vars(scores), work=work, order=ranking(scores), first_round=first_round, refused=refused,
        batch_parts=limits.batch_parts, seconds_taken=time.perf_counter() - begin,
    )  # fmt: skip


def ranking(scores: SearchScores) -> np.ndarray:
    """Return the indices of the points that are legal and fit into memory, fastest first.

    Times count as equal if they fall into the same band. The first band begins at the shortest time. In each band, the
    longest time is ``TIED`` times the shortest time. Within a band, points are sorted by P(OOM), rounded to a whole
    percentage, and then by time.
    """
    seconds, p_oom = scores.seconds[scores.fits], scores.p_oom[scores.fits]
    bands = np.floor(np.log(seconds / seconds.min(initial=np.inf)) / np.log(TIED))
    return scores.fits[np.lexsort((seconds, np.rint(100 * p_oom), bands))]


def score(
    work: Workload, machine: Machine, constants: Constants, reason: np.ndarray,
    watch: Callable[[int, int], None] | None = None,
) -> SearchScores:  # fmt: skip
    """Evaluate the legal points, and set the reason of the points that do not fit into memory.

    Args:
        work: The points.
        machine: The machine.
        constants: The planner's constants for the machine.
        reason: Why each point is illegal (``space.rejections``), [n]. 0 if it is legal.
        watch: Called with the number of evaluated points and the number of legal points.
    """
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
    """Return the memory and the time of points, as three arrays [n]:

    - the peak bytes of the rank that needs the most memory
    - the seconds of a step
    - a lower bound on the seconds of a step with any number of batch parts

    Many points share block times and weight traffic, so each distinct value is computed only once. The lower bound
    assumes that batch parts hide all communication over x and y, and avoid copies of tokens (``COPIES``).
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
    """Return the indices of points that could be among the ``RANKED`` fastest if they had more batch parts.

    The result includes points that do not fit, because more batch parts can reduce memory.
    """
    may_fit = (scores.reason == 0) | ((scores.reason == OUT_OF_MEMORY) & (scores.p_oom < HOPELESS))
    limit = np.inf
    if len(scores.fits):
        ranked = min(RANKED, len(scores.fits)) - 1
        limit = np.partition(scores.seconds[scores.fits], ranked)[ranked]
    is_split = np.asarray(work.layout.x * work.layout.y) > 1
    return np.flatnonzero(may_fit & is_split & (scores.least <= limit))


def with_batch_parts(work: Workload, batch_parts: Sequence[int]) -> Workload:
    """Return copies of all points, one for each number in ``batch_parts``."""
    count = np.size(work.layout.x)
    repeated = work.map_arrays(lambda array: np.tile(array, len(batch_parts)))
    return repeated.but(batch_parts=np.repeat(np.array(batch_parts, dtype=np.int32), count))
