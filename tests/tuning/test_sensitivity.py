"""Shapley values: their axioms, and the sum over all orders of the knobs; the surrogate's error."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fourfold.tuning.candidates import Candidates
from fourfold.tuning.result import Result, Trial
from fourfold.tuning.sensitivity import LEAST_TRIALS, sensitivity, shapley_values, surrogate, varying_knobs


def over_all_orders(codes: np.ndarray, values: np.ndarray, explained: int) -> np.ndarray:
    """The definition: the mean change of the mean value as knobs become known, over all orders of the knobs."""
    knobs = len(codes)
    found = np.zeros(knobs)
    for order in itertools.permutations(range(knobs)):
        agree, before = np.ones(len(values), dtype=bool), values.mean()
        for knob in order:
            agree &= codes[knob] == codes[knob, explained]
            after = values[agree].mean()
            found[knob] += after - before
            before = after
    return found / math.factorial(knobs)


@pytest.mark.parametrize("seed", range(3))
def test_shapley_values_are_those_of_the_definition(seed: int) -> None:
    draw = np.random.default_rng(seed)
    codes, values = draw.integers(0, 3, (4, 60)), draw.normal(size=60)
    for explained in (0, 17):
        np.testing.assert_allclose(
            shapley_values(codes, values, explained), over_all_orders(codes, values, explained), atol=1e-12
        )


def test_shapley_values_of_a_whole_space_are_its_effects() -> None:
    first, second, third = np.array(list(itertools.product(range(3), range(2), range(2)))).T
    values = 2.0 * first - 3.0 * second  # the third does nothing
    found = shapley_values(np.array([first, second, third]), values, explained=len(values) - 1)
    np.testing.assert_allclose(found, [2 * (2 - 1), -3 * (1 - 0.5), 0], atol=1e-12)


def test_the_values_of_the_best_add_up(candidates: Candidates) -> None:
    logs = np.log(candidates.seconds)
    best = int(np.argmin(logs))
    found = sensitivity(candidates, logs, best, 5, 0.1)
    assert sum(found.of_best.values()) == pytest.approx(logs[best] - logs.mean())
    assert set(found.importance) == set(varying_knobs(candidates)) >= {"x", "pp", "micro_batch", "recompute"}
    assert "cp" not in found.importance
    assert list(found.importance.values()) == sorted(found.importance.values(), reverse=True)


def test_a_surrogate_knows_its_error(candidates: Candidates) -> None:
    pytest.importorskip("sklearn")
    some = np.random.default_rng(0).choice(candidates.count, 40, replace=False).tolist()

    def trials(seconds: np.ndarray) -> list[Trial]:
        return [Trial(index, Result("done", float(value))) for index, value in zip(some, seconds, strict=True)]

    assert surrogate(candidates, trials(candidates.seconds[some])[: LEAST_TRIALS - 1]) is None
    smooth = surrogate(candidates, trials(candidates.seconds[some]))
    noise = surrogate(candidates, trials(np.exp(np.random.default_rng(1).normal(size=40))))
    assert smooth is not None and noise is not None
    predicted, count, error = smooth
    assert count == 40
    truth = np.log(candidates.seconds)
    rest = np.setdiff1d(np.arange(candidates.count), some)
    actual = math.sqrt(np.mean((predicted[rest] - truth[rest]) ** 2))
    assert 0.5 < actual / error < 2
    assert error < 0.8 * truth.std() and noise[2] > 0.8
