"""Finds the fastest layouts that fit: all legal layouts are evaluated, with no sampling."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from fourfold.errors import UserError
from fourfold.planning.cases import unique_rows
from fourfold.planning.cost.activations import block_bytes
from fourfold.planning.cost.block import block_time
from fourfold.planning.cost.memory import p_out_of_memory, peak_memory
from fourfold.planning.cost.step import step_seconds
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.search.space import OUT_OF_MEMORY, REASONS, Limits, all_layouts, rejections
from fourfold.planning.workload import Workload

CHUNK = 1 << 14
"""Points evaluated at once: their arrays stay in a processor's cache."""
MAX_P_OUT_OF_MEMORY = 0.05
BLOCK_KEY = ("x", "y", "cp", "micro_batch", "cp_method")
"""Fields on which the time of one block depends, within one search."""


@dataclass(frozen=True)
class Found:
    """All points of a search: layouts, seconds (infinite where illegal), bytes, P(OOM), and the reason of a refusal.

    order: the legal points, fastest first; evaluated: how many there were; seconds_taken: wall time.
    """

    work: Workload
    seconds: np.ndarray
    memory: np.ndarray
    p_oom: np.ndarray
    reason: np.ndarray
    order: np.ndarray
    evaluated: int
    seconds_taken: float

    def point(self, index: int | np.ndarray) -> Workload:
        """One layout, with plain numbers in place of the narrow ones of the search."""
        point = self.work.take(np.array(index))
        numbers = {name: value.item() for name, value in vars(point.layout).items() if isinstance(value, np.integer)}
        return point.but(**numbers)

    def rejected(self) -> dict[str, int]:
        """Count the points that each reason has refused."""
        counts = np.bincount(self.reason, minlength=len(REASONS))
        return {REASONS[i]: int(n) for i, n in enumerate(counts) if n and i}


def search(base: Workload, machine: Machine, constants: Constants, gpus: int, limits: Limits | None = None) -> Found:
    """Evaluate every layout of ``base`` on ``gpus`` devices; raises ``UserError`` where the limits leave none."""
    begin = time.perf_counter()
    limits = limits or Limits()
    work = all_layouts(base, gpus, limits)
    count = np.size(work.layout.x)
    if count == 0:
        raise UserError(f"no layout of {gpus} GPUs is left by the given limits; allow more axes or sizes")
    reason = np.empty(count, dtype=np.uint8)
    seconds, memory, p_oom = np.full(count, np.inf), np.full(count, np.nan), np.full(count, np.nan)
    for begin_at in range(0, count, CHUNK):
        chunk = slice(begin_at, min(begin_at + CHUNK, count))
        reason[chunk] = rejections(work.take(chunk), machine)
        index = begin_at + np.flatnonzero(reason[chunk] == 0)
        if len(index):
            part = work.take(index).with_float_arrays()
            memory[index], seconds[index] = evaluate(part, machine, constants)
            p_oom[index] = p_out_of_memory(memory[index], part, machine)
    legal = np.flatnonzero(reason == 0)
    reason[legal[p_oom[legal] > MAX_P_OUT_OF_MEMORY]] = OUT_OF_MEMORY
    fits = np.flatnonzero(reason == 0)
    order = fits[np.argsort(seconds[fits], kind="stable")]
    return Found(work, seconds, memory, p_oom, reason, order, count, time.perf_counter() - begin)


def evaluate(work: Workload, machine: Machine, constants: Constants) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the fullest rank and seconds of a step, for every point; a block is computed once for all points that
    share it."""
    first, back = unique_rows([getattr(work.layout, name) for name in BLOCK_KEY])
    blocks = work.take(first)
    memory = peak_memory(work, machine, block_bytes(blocks).take(back))
    seconds = step_seconds(work, machine, constants, block_time(blocks, machine, constants).take(back))
    return np.broadcast_to(memory, back.shape), np.broadcast_to(seconds, back.shape)
