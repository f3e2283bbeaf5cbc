"""Sample the layouts that a search refuses, evenly for each reason, and compute their time and memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.search.fastest import evaluate
from fourfold.planning.search.space import (
    NO_OFFLOAD,
    REASONS,
    SearchLimits,
    all_grids,
    choices_of,
    refused_grids,
    rejections,
    with_recomputes,
)
from fourfold.planning.workload import Workload

GRIDS = 100
"""Largest number of grids per reason for which all choices are tried."""


@dataclass(frozen=True)
class Refused:
    """Illegal layouts with predictions. The formulas work for them too, although no program could run them.

    ``seconds`` and ``memory`` are [n] seconds of a step and bytes of the fullest rank, not finite if the formulas have
    no answer. ``reason`` is [n] indices into ``space.REASONS``.
    """

    work: Workload
    seconds: np.ndarray
    memory: np.ndarray
    reason: np.ndarray


def refused_sample(
    base: Workload, machine: Machine, constants: Constants, gpus: int, limits: SearchLimits, each: int
) -> Refused:
    """Take at most ``each`` illegal layouts for every reason except a lack of memory, evenly from the whole space."""
    grids = all_grids(base, gpus, limits)
    of_grids, _ = refused_grids(base, grids, limits, machine)
    some = _even_by_value(of_grids, range(len(REASONS)), GRIDS)
    choices = choices_of(base, {name: column[some] for name, column in grids.items()}, limits)
    work = with_recomputes(choices, limits)
    reason = np.repeat(rejections(choices, machine), len(limits.recomputes))
    computed = ~np.asarray(work.layout.offload, bool) | (machine.host > 0)
    kept = _even_by_value(np.where(computed, reason, 0), range(1, NO_OFFLOAD), each)
    work = work.take(kept)
    memory = seconds = np.array([])
    if len(kept):
        with np.errstate(all="ignore"):
            memory, seconds, _ = evaluate(work.with_float_arrays(), machine, constants)
    return Refused(work, np.asarray(seconds), np.asarray(memory), reason[kept])


def even(places: np.ndarray, count: int) -> np.ndarray:
    """Return at most ``count`` of some positions, evenly spaced."""
    if len(places) <= count:
        return places
    spaced: np.ndarray = places[np.linspace(0, len(places) - 1, count).astype(int)]
    return spaced


def _even_by_value(values: np.ndarray, wanted: range, count: int) -> np.ndarray:
    return np.concatenate([even(np.flatnonzero(values == value), count) for value in wanted])
