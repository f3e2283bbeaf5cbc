"""The proposer: what it tries first, what it learns, when it ends, and what it never tries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_trials import tiny_candidates, true_seconds

from fourfold.tuning.candidates import Candidates
from fourfold.tuning.memory_margin import MemoryMargin, needs_as_much
from fourfold.tuning.propose import MOST_LIKELY_OUT, UNLIKELY, doubt, eligible, p_out, posterior_of, propose
from fourfold.tuning.residual import prior_covariance, prior_variance
from fourfold.tuning.trial_result import Trial, TrialOutcome, TrialResult


def done(index: int, seconds: float, noise: float = 0.0) -> Trial:
    return Trial(index, TrialResult("done", seconds, noise))


def failed(index: int, outcome: TrialOutcome) -> Trial:
    return Trial(index, TrialResult(outcome))


def played(candidates: Candidates, truth: np.ndarray, limit: float = np.inf, most: int = 60) -> list[Trial]:
    """Run a whole search. Layouts that truly need more than ``limit`` run out of memory."""
    trials: list[Trial] = []
    need = candidates.needed * 1.4
    while len(trials) < most and (index := propose(candidates, trials).index) is not None:
        fits = need[index] <= limit
        trials.append(done(index, float(truth[index])) if fits else failed(index, "out of memory"))
    return trials


def test_the_first_trial_is_the_fastest_prediction(candidates: Candidates) -> None:
    assert candidates.count > 60
    assert propose(candidates, []).index == int(np.argmin(candidates.seconds))


@pytest.mark.parametrize("seed", range(4))
def test_a_search_ends_near_the_best(candidates: Candidates, seed: int) -> None:
    truth = true_seconds(candidates, seed)
    trials = played(candidates, truth)
    fastest = min(trial.result.seconds or np.inf for trial in trials)
    assert fastest <= 1.03 * truth.min()
    assert len({trial.index for trial in trials}) < candidates.count / 3


def test_predictions_that_are_right_end_the_search_at_once(candidates: Candidates) -> None:
    truth = candidates.seconds * 1.7  # a common factor does not change the order of the layouts
    trials = played(candidates, truth)
    assert {trial.index for trial in trials[:1]} == {int(np.argmin(truth))}
    chosen = min(trials, key=lambda trial: trial.result.seconds or np.inf)
    assert chosen.index == int(np.argmin(truth))


def test_the_end_is_a_matter_of_chance(candidates: Candidates) -> None:
    best = int(np.argmin(candidates.seconds))
    parts = candidates.seconds_by_part.copy()
    parts[best] /= 10
    ahead = replace(candidates, seconds_by_part=parts)
    assert propose(ahead, [done(index, float(ahead.seconds[index])) for index in (best, 0, 1, 2)]).index is None
    first = propose(candidates, [done(best, float(candidates.seconds[best]))])
    assert first.index is not None and first.chance is not None and first.chance > UNLIKELY


def test_doubt_is_about_layouts_that_are_predicted_alike(candidates: Candidates) -> None:
    parts = candidates.seconds_by_part.copy()
    parts[np.argmin(candidates.seconds)] /= 10
    assert doubt(candidates) > 0.5
    assert doubt(replace(candidates, seconds_by_part=parts)) < 0.01


def test_layouts_within_noise_are_tried_again(candidates: Candidates) -> None:
    order = np.argsort(candidates.seconds)[:2].tolist()
    trials = [done(order[0], 1.0, 0.03), done(order[1], 1.01, 0.03)]
    others = [failed(index, "refused") for index in range(candidates.count) if index not in order]
    again = propose(candidates, trials + others)
    assert again.index == order[1]
    assert "noise" in again.why
    assert propose(candidates, [done(order[0], 1.0), done(order[1], 1.3), *others]).index is None


def test_a_layout_that_runs_is_not_proposed_again(candidates: Candidates) -> None:
    first = propose(candidates, []).index
    assert first is not None
    second = propose(candidates, [], running=[first]).index
    assert second not in (None, first)


def test_a_value_that_only_crashes_is_left_alone(candidates: Candidates) -> None:
    pipelines = np.flatnonzero(candidates.knobs["pp"] == 2)[:2].tolist()
    worked = int(np.flatnonzero(candidates.knobs["pp"] == 1)[0])
    trials = [failed(index, "crashed") for index in pipelines]
    assert eligible(candidates, trials)[candidates.knobs["pp"] == 2].any()
    assert not eligible(candidates, [*trials, done(worked, 1.0)])[candidates.knobs["pp"] == 2].any()


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_tried_that_needs_as_much_as_what_ran_out(seed: int) -> None:
    fastest = np.argsort(tiny_candidates().seconds)[:40]
    limit = 1.4 * float(np.quantile(tiny_candidates().needed[fastest], 0.2))
    candidates = tiny_candidates(limit)
    trials = played(candidates, true_seconds(candidates, seed), limit)
    ran_out = [n for n, trial in enumerate(trials) if trial.result.outcome == "out of memory"]
    assert ran_out, "the limit is such that some of the fastest do not fit"
    for n in ran_out:
        forbidden = needs_as_much(candidates, trials[n].index)
        assert forbidden[trials[n].index]
        assert not any(forbidden[later.index] for later in trials[n + 1 :])
    assert len(ran_out) <= 4, "a few failures teach a memory that is predicted 40 % too low"


def test_needing_as_much_is_an_order(candidates: Candidates) -> None:
    larger = np.array([needs_as_much(candidates, index) for index in range(candidates.count)])
    assert larger.diagonal().all()
    assert larger.sum() > 2 * candidates.count, "many layouts can be compared"
    assert not (larger & larger.T & ~np.eye(candidates.count, dtype=bool)).any()
    assert (larger @ larger == larger).all(), "what needs more than what needs more needs more"
    for index in range(0, candidates.count, 17):
        assert (candidates.needed[larger[index]] >= 0.98 * candidates.needed[index]).all(), "as the planner has it"


def test_memory_is_learned_from_what_ran_out_and_from_bytes(candidates: Candidates) -> None:
    limit = float(np.median(candidates.needed))
    tight = tiny_candidates(limit)
    at = int(np.argmin(np.abs(np.log(tight.needed / (limit * 0.93)))))
    before = p_out(tight, [])
    assert 0.02 < before[at] < 0.5
    assert (p_out(tight, [failed(at, "out of memory")]) >= before - 1e-9).all()
    assert p_out(tight, [failed(at, "out of memory")])[at] > MOST_LIKELY_OUT
    assert (p_out(tight, [done(at, 1.0)]) <= before + 1e-9).all()
    half = Trial(at, TrialResult("done", 1.0, memory_bytes=float(tight.needed[at]) / 2))
    assert p_out(tight, [half] * 2)[tight.needed < 1.5 * limit].max() < 0.01
    twice = Trial(0, TrialResult("done", 1.0, memory_bytes=float(tight.needed[0]) * 1.5))
    assert p_out(tight, [twice] * 2)[tight.needed > 0.8 * limit].min() > 0.95


def test_one_odd_measurement_does_not_decide(candidates: Candidates) -> None:
    margin = MemoryMargin(candidates)
    for index in range(5):
        margin.measured(index, float(candidates.needed[index]))
    margin.measured(5, float(candidates.needed[5]) * 3)
    assert margin.p_out()[candidates.needed < candidates.machine.memory / 2].max() < 0.05


def test_the_posterior_equals_a_gaussian_process(candidates: Candidates) -> None:
    everyone = np.arange(candidates.count)
    prior = prior_covariance(candidates, everyone, everyone)
    np.testing.assert_allclose(prior.diagonal(), prior_variance(candidates))
    assert np.linalg.eigvalsh(prior).min() > -1e-9
    tried, noise = [3, 40, 11], 0.05
    trials = [done(index, 0.7 * (1 + index / 100), noise) for index in tried]
    belief = posterior_of(candidates, trials)
    ratio = np.log([trial.result.seconds for trial in trials]) - np.log(candidates.seconds[tried])
    prior = prior_covariance(candidates, everyone, everyone, belief.scale)
    among = prior[np.ix_(tried, tried)] + np.eye(3) * (noise**2 + 0.02**2)
    gain = prior[:, tried] @ np.linalg.inv(among)
    np.testing.assert_allclose(belief.mean, np.log(candidates.seconds) + gain @ ratio)
    np.testing.assert_allclose(belief.covariance(everyone, everyone), prior - gain @ prior[tried], atol=1e-12)
    drawn = belief.draws(np.array([7, 40]), seed=0)
    np.testing.assert_allclose(drawn.mean(axis=0), belief.mean[[7, 40]], atol=0.05)
    np.testing.assert_allclose(np.cov(drawn.T), belief.covariance(np.array([7, 40]), np.array([7, 40])), atol=0.02)
    difference = belief.covariance(everyone, everyone)
    exact = difference.diagonal() + difference[11, 11] - 2 * difference[:, 11]
    np.testing.assert_allclose(belief.spread_against(11) ** 2, np.maximum(exact, 0), atol=1e-12)


def test_surprising_trials_make_other_predictions_less_certain(candidates: Candidates) -> None:
    some = np.argsort(candidates.seconds)[:8].tolist()
    draw = np.random.default_rng(0)
    expected = posterior_of(candidates, [done(index, float(candidates.seconds[index])) for index in some])
    odd = [done(index, float(candidates.seconds[index] * np.exp(draw.normal(0, 1)))) for index in some]
    surprised = posterior_of(candidates, odd)
    assert expected.scale < candidates.doubt < surprised.scale
    best = int(np.argmin(candidates.seconds))
    untried = np.setdiff1d(np.arange(candidates.count), some)
    assert (surprised.spread_against(best)[untried] > expected.spread_against(best)[untried]).all()


def test_a_slow_axis_is_slow_elsewhere(candidates: Candidates) -> None:
    """One trial that mostly communicates over x corrects all layouts with x."""
    x = candidates.shares[:, 2]
    most, no = int(np.argmax(x)), int(np.argmin(x))
    trials = [done(no, float(candidates.seconds[no])), done(most, 1.5 * float(candidates.seconds[most]))]
    moved = posterior_of(candidates, trials).mean - np.log(candidates.seconds)
    assert moved[x > 0.7 * x.max()].mean() > moved[x < 0.1 * x.max()].mean() + 0.05
