"""How much each knob matters: exact Shapley values of predicted step times over the legal layouts of a search.

The value of a set of knobs is the mean of log seconds over the layouts that agree with the explained one in them. Only
legal layouts are averaged, so sizes of axes whose product is the number of devices are never taken apart (conditional
Shapley values: Aas, Jullum, Løland 2021, arXiv 1903.10464).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.tuning.candidates import Candidates
from fourfold.tuning.result import Trial

GROUPS = {"schedule": ("schedule", "interleave"), "recompute": ("recompute", "recompute_every", "offload")}
"""Knobs that are explained as one, because one means nothing without the others."""
EXPLAINED = 200
"""Layouts over which a knob's importance is averaged."""
LEAST_TRIALS, FOLDS = 5, 5
"""Layouts with a step time that a surrogate needs, and folds of its cross-validation."""
TREES = 100


@dataclass(frozen=True)
class Sensitivity:
    """Shapley values by knob, of the logarithm of the step time."""

    importance: dict[str, float]
    """Mean size over the layouts, largest first."""
    of_best: dict[str, float]
    """The best layout's value against the mean of all: negative where it is faster."""
    layouts: int
    """Tried layouts that the explained model was fitted to."""
    error: float | None
    """The model's error on trials that were held out of its fit; None without such trials. The mean for the planner,
    the root mean square of the logarithm for trees."""


def sensitivity(
    candidates: Candidates, log_seconds: np.ndarray, best: int, layouts: int, error: float | None
) -> Sensitivity:
    """Explain ``log_seconds`` [n] of all candidates by their knobs."""
    knobs = varying_knobs(candidates)
    some = np.unique(np.linspace(0, candidates.count - 1, EXPLAINED).round().astype(int))
    codes = np.array(list(knobs.values()))
    sizes = np.mean([np.abs(shapley_values(codes, log_seconds, int(index))) for index in some], axis=0)
    order = np.argsort(-sizes, kind="stable")
    names, of_best = list(knobs), shapley_values(codes, log_seconds, best)
    return Sensitivity(
        {names[i]: float(sizes[i]) for i in order}, {names[i]: float(of_best[i]) for i in order}, layouts, error
    )


def varying_knobs(candidates: Candidates) -> dict[str, np.ndarray]:
    """[n] a whole number for each value of every knob that has several, those of ``GROUPS`` as one."""
    grouped = {name for group in GROUPS.values() for name in group}
    columns = {name: [values] for name, values in candidates.knobs.items() if name not in grouped}
    columns |= {name: [candidates.knobs[each] for each in group] for name, group in GROUPS.items()}
    coded = {name: np.unique(np.stack(parts), axis=1, return_inverse=True)[1] for name, parts in columns.items()}
    return {name: codes for name, codes in coded.items() if codes.any()}


def shapley_values(codes: np.ndarray, values: np.ndarray, explained: int) -> np.ndarray:
    """[knobs] exact Shapley values of one point's value. codes: [knobs, n]; values: [n]; sums over all 2^knobs sets."""
    knobs = len(codes)
    agree = ((codes == codes[:, explained, None]) << np.arange(knobs)[:, None]).sum(axis=0)
    sums = np.bincount(agree, values, 1 << knobs)
    counts = np.bincount(agree, minlength=1 << knobs).astype(float)
    sets = np.arange(1 << knobs)
    for knob in range(knobs):  # to sums over all points that agree in at least a set
        without = sets[(sets >> knob) & 1 == 0]
        sums[without] += sums[without | 1 << knob]
        counts[without] += counts[without | 1 << knob]
    means = sums / counts
    sizes = np.bitwise_count(sets)
    weights = np.array([1 / (knobs * math.comb(knobs - 1, size)) for size in range(knobs)])
    found = []
    for knob in range(knobs):
        without = sets[(sets >> knob) & 1 == 0]
        found.append(float((weights[sizes[without]] * (means[without | 1 << knob] - means[without])).sum()))
    return np.array(found)


def surrogate(candidates: Candidates, trials: Sequence[Trial], seed: int = 0) -> tuple[np.ndarray, int, float] | None:
    """Log seconds [n] of all candidates by trees that are fitted to the trials alone, without the planner.

    Also the number of layouts that they were fitted to, and the root mean square error on those held out; None where
    there are fewer than ``LEAST_TRIALS``.
    """
    logs: dict[int, list[float]] = {}
    for trial in trials:
        if trial.result.seconds is not None:
            logs.setdefault(trial.index, []).append(math.log(trial.result.seconds))
    if len(logs) < LEAST_TRIALS:
        return None
    from sklearn.ensemble import ExtraTreesRegressor
    from sklearn.model_selection import KFold, cross_val_predict

    index = np.array(list(logs))
    known, targets = candidates.features[index], np.array([np.mean(each) for each in logs.values()])
    trees = ExtraTreesRegressor(n_estimators=TREES, random_state=seed)
    folds = KFold(min(FOLDS, len(index)), shuffle=True, random_state=seed)
    error = float(np.sqrt(np.mean((cross_val_predict(trees, known, targets, cv=folds) - targets) ** 2)))
    return np.asarray(trees.fit(known, targets).predict(candidates.features)), len(index), error
