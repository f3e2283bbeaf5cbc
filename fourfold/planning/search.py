"""Finds the fastest layouts that fit: all legal points are evaluated, none is sampled."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from fourfold.errors import UserError
from fourfold.planning.block_time import block_time
from fourfold.planning.constants import Constants
from fourfold.planning.machine import Machine
from fourfold.planning.memory import p_out_of_memory, peak_memory
from fourfold.planning.space import OUT_OF_MEMORY, REASONS, Limits, all_layouts, rejections
from fourfold.planning.step_time import step_seconds
from fourfold.planning.workload import Workload

CHUNK = 1 << 14
"""Points evaluated at once: their arrays stay in a processor's cache."""
MAX_P_OUT_OF_MEMORY = 0.05
BLOCK_KEY = ("x", "y", "cp", "micro_batch")
"""What the time of one block depends on, within one search."""


@dataclass(frozen=True)
class Found:
    """All points of a search: layouts, seconds (infinite where illegal), bytes, P(OOM), and the reason of a refusal.

    order: the legal points, fastest first; evaluated: how many points were looked at; seconds_taken: in how long.
    """

    work: Workload
    seconds: np.ndarray
    memory: np.ndarray
    p_oom: np.ndarray
    reason: np.ndarray
    order: np.ndarray
    evaluated: int
    seconds_taken: float

    def point(self, index: int) -> Workload:
        """One layout, with plain numbers."""
        return self.work.take(np.array(index))

    def rejected(self) -> dict[str, int]:
        """How many points each reason has refused."""
        counts = np.bincount(self.reason, minlength=len(REASONS))
        return {REASONS[i]: int(n) for i, n in enumerate(counts) if n and i}


def search(base: Workload, machine: Machine, constants: Constants, gpus: int, limits: Limits | None = None) -> Found:
    """Every layout of ``base`` on ``gpus`` devices; raises ``UserError`` where nothing is legal or fits."""
    begin = time.perf_counter()
    limits = limits or Limits()
    work = all_layouts(base, gpus, limits)
    count = np.size(work.x)
    if count == 0:
        raise UserError(f"no layout of {gpus} GPUs is left by the given limits; allow more axes or sizes")
    reason = rejections(work)
    seconds, memory, p_oom = np.full(count, np.inf), np.full(count, np.nan), np.full(count, np.nan)
    legal = np.flatnonzero(reason == 0)
    for begin_at in range(0, len(legal), CHUNK):
        index = legal[begin_at : begin_at + CHUNK]
        part = _as_floats(work.take(index))
        memory[index] = peak_memory(part, machine)
        p_oom[index] = p_out_of_memory(memory[index], machine.memory)
        seconds[index] = evaluate(part, machine, constants)
    reason[legal[p_oom[legal] > MAX_P_OUT_OF_MEMORY]] = OUT_OF_MEMORY
    fits = np.flatnonzero(reason == 0)
    order = fits[np.argsort(seconds[fits], kind="stable")]
    return Found(work, seconds, memory, p_oom, reason, order, count, time.perf_counter() - begin)


def evaluate(work: Workload, machine: Machine, constants: Constants) -> np.ndarray:
    """Seconds of a step of every point; a block's time is computed once for all points that share it."""
    keys = np.zeros(np.size(work.x), dtype=np.int64)
    for name in BLOCK_KEY:
        values, codes = np.unique(getattr(work, name), return_inverse=True)
        keys = keys * len(values) + codes
    _, first, back = np.unique(keys, return_index=True, return_inverse=True)
    block = block_time(work.take(first), machine, constants)
    return np.broadcast_to(step_seconds(work, machine, constants, block.take(back)), keys.shape)


def _as_floats(work: Workload) -> Workload:
    arrays = {k: v.astype(float) for k, v in vars(work).items() if np.ndim(v) and v.dtype.kind == "i"}
    return replace(work, **arrays)
