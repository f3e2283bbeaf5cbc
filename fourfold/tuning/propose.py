"""Propose the next trial: a legal layout that probably fits into memory, chosen by the lower bound of its step time.

Predictions determine the order of the first trials. After each trial, the residual model corrects the predictions, and
the memory margin is updated. If no new layout is likely to be better, layouts that are within noise of the best one are
tried again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.tuning.candidates import Candidates
from fourfold.tuning.memory_margin import MemoryMargin, needs_as_much
from fourfold.tuning.residual import Posterior, posterior
from fourfold.tuning.result import Trial

BOUND = 1.0
"""Distance between the expected log seconds and the lower bound, in standard deviations."""
BETTER, UNLIKELY = 0.02, 0.05
"""A layout is *better* if it saves at least the first number, as a fraction of the best layout's step time. The search
ends when the probability that any layout is better falls below the second number."""
MOST_LIKELY_OUT = 0.2
"""If a layout's probability of running out of memory is above this, it is not tried."""
MOST_TRIALS_OF_ONE = 3
"""Largest number of trials of the same layout. Repeating a trial shows whether a difference is noise."""
NOISE, NOISE_WEIGHT = 0.02, 2
"""Assumed standard deviation of the logarithm of the step time between equal runs, and its weight, as a number of
repeated trials."""
CRASHES = 2
"""If a value of a knob has never worked, it is dropped after this many crashes."""
DRAWN = 256
"""The probability that a layout is better is estimated from random draws of log seconds. They are drawn for this many
candidates, the ones with the lowest lower bounds."""


@dataclass(frozen=True)
class Proposal:
    """The layout to try next, or the end of the search if ``index`` is None. ``why`` explains the choice in words."""

    index: int | None
    why: str
    chance: float | None = None
    """Probability that some layout is ``BETTER`` than the best trial. None before the first trial."""


def propose(candidates: Candidates, trials: Sequence[Trial], running: Sequence[int] = (), seed: int = 0) -> Proposal:
    """Choose the next layout. ``running`` lists the candidates that are being tried at the moment."""
    may = eligible(candidates, trials)
    may[list(running)] = False
    timed = [trial for trial in trials if trial.result.seconds is not None]
    if not may.any():
        return Proposal(None, "every layout that is likely to fit was tried")
    if not timed:
        index = int(np.flatnonzero(may)[np.argmin(candidates.seconds[may])])
        return Proposal(index, "the fastest by prediction among the layouts that are likely to fit")
    belief = posterior_of(candidates, timed)
    best = incumbent(belief, timed)
    tried = np.isin(np.arange(candidates.count), [trial.index for trial in timed])
    bound = belief.mean - BOUND * belief.spread_against(best)
    new = np.where(may & ~tried, bound, np.inf)
    chance = chance_of_better(belief, new, best, seed)
    if chance >= UNLIKELY:
        index = int(np.argmin(new))
        return Proposal(index, f"the best lower bound: {_expected(belief, index, best, chance)}", chance)
    known = np.where(may & tried, bound, np.inf)
    again = chance_of_better(belief, known, best, seed)
    if again >= UNLIKELY:
        known[best] = np.inf
        index = int(np.argmin(known))
        return Proposal(index, f"again, because it is within noise: {_expected(belief, index, best, again)}", again)
    end = f"the chance that a layout is {BETTER:.0%} faster is {chance:.1%} for new ones and {again:.1%} for tried ones"
    return Proposal(None, end, max(chance, again))


def _expected(belief: Posterior, index: int, best: int, chance: float) -> str:
    slower = math.exp(belief.mean[index] - belief.mean[best]) - 1
    than = f"expected {abs(slower):.1%} {'slower' if slower > 0 else 'faster'} than the best"
    return f"{than}; chance that one is {BETTER:.0%} faster: {chance:.0%}"


def posterior_of(candidates: Candidates, timed: Sequence[Trial]) -> Posterior:
    """Return the posterior for all candidates, given the trials that measured a step time."""
    noise = noise_between_runs(timed)
    return posterior(
        candidates,
        np.array([trial.index for trial in timed], dtype=int),
        np.array([trial.result.seconds for trial in timed]),
        np.array([math.hypot(noise, trial.result.noise) for trial in timed]),
    )


def noise_between_runs(timed: Sequence[Trial]) -> float:
    """Return the standard deviation of the logarithm of the step time between equal runs, from ``NOISE`` and the
    repeated trials."""
    logs: dict[int, list[float]] = {}
    for trial in timed:
        assert trial.result.seconds is not None
        logs.setdefault(trial.index, []).append(math.log(trial.result.seconds))
    squares = sum(float(np.var(each)) * len(each) for each in logs.values())
    degrees = sum(len(each) - 1 for each in logs.values())
    return math.sqrt((NOISE_WEIGHT * NOISE**2 + squares) / (NOISE_WEIGHT + degrees))


def incumbent(belief: Posterior, timed: Sequence[Trial]) -> int:
    """Return the layout with the lowest expected time, among the layouts that were tried."""
    done = sorted(
        {trial.index for trial in timed if trial.result.outcome == "done"} or {trial.index for trial in timed}
    )
    return done[int(np.argmin(belief.mean[done]))]


def eligible(candidates: Candidates, trials: Sequence[Trial]) -> np.ndarray:
    """Return an array [n] that is True for layouts that may be tried or repeated. Such a layout probably fits into
    memory, and no layout that certainly needs less memory has run out of memory."""
    may = p_out(candidates, trials) <= MOST_LIKELY_OUT
    counts = Counter(trial.index for trial in trials)
    for trial in trials:
        if trial.result.outcome == "out of memory":
            may &= ~needs_as_much(candidates, trial.index)
        if trial.result.outcome != "done" or counts[trial.index] >= MOST_TRIALS_OF_ONE:
            may[trial.index] = False
    return np.asarray(may & ~_values_that_crash(candidates, trials))


def p_out(candidates: Candidates, trials: Sequence[Trial]) -> np.ndarray:
    """Return each layout's probability of running out of memory, given the trials, [n]."""
    margin = MemoryMargin(candidates)
    for trial in trials:
        if trial.result.outcome == "out of memory":
            margin.ran_out(trial.index)
        elif trial.result.memory_bytes is not None:
            margin.measured(trial.index, trial.result.memory_bytes)
        elif trial.result.outcome in ("done", "hopeless"):
            margin.fitted(trial.index)
    return margin.p_out()


def chance_of_better(belief: Posterior, bound: np.ndarray, best: int, seed: int = 0) -> float:
    """Return the probability that any layout with a finite bound is ``BETTER`` than the incumbent."""
    lowest = np.argsort(bound, kind="stable")[:DRAWN]
    others = lowest[np.isfinite(bound[lowest]) & (lowest != best)]
    if not len(others):
        return 0.0
    drawn = belief.draws(np.append(others, best), seed)
    return float((drawn[:, :-1].min(axis=1) < drawn[:, -1] + math.log(1 - BETTER)).mean())


def doubt(candidates: Candidates, seed: int = 0) -> float:
    """Return the probability, before any trial, that a layout is ``BETTER`` than the planner's first choice."""
    bound = np.where(eligible(candidates, []), candidates.seconds, np.inf)
    return chance_of_better(posterior_of(candidates, []), bound, int(np.argmin(bound)), seed)


def _values_that_crash(candidates: Candidates, trials: Sequence[Trial]) -> np.ndarray:
    """Return an array [n] that is True for layouts with a knob value that has crashed at least ``CRASHES`` times and
    has never worked."""
    found = np.zeros(candidates.count, dtype=bool)
    crashed = [trial.index for trial in trials if trial.result.outcome in ("crashed", "hung")]
    worked = [trial.index for trial in trials if trial.result.outcome in ("done", "hopeless", "out of memory")]
    for values in candidates.knobs.values():
        counts = Counter(values[crashed].tolist())
        bad = [value for value, times in counts.items() if times >= CRASHES and value not in values[worked]]
        if worked:  # If no trial has worked, we cannot tell which value causes the crashes.
            found |= np.isin(values, bad)
    return found
