"""Propose the next trial of a search. Of the layouts that probably fit into memory, try the layout with the lowest
lower bound on its step time.

The first trial follows the planner's predictions. After each trial, ``residual`` corrects the predicted times, and
``memory_margin`` corrects the predicted memory. If no new layout is likely to be better, layouts that are within noise
of the best layout are tried again.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.tuning.candidates import Candidates
from fourfold.tuning.memory_margin import MemoryMargin, needs_as_much
from fourfold.tuning.residual import Posterior, posterior
from fourfold.tuning.trial_result import Trial

BOUND = 1.0
"""The lower bound on a step time is this many standard deviations below the expected logarithm of the seconds."""
BETTER, UNLIKELY = 0.02, 0.05
"""A layout is *better* if it saves at least the fraction ``BETTER`` of the best layout's step time. The search ends
when the probability that any layout is better falls below ``UNLIKELY``."""
MOST_LIKELY_OUT = 0.2
"""A layout is not tried if its probability of running out of memory is higher than this."""
MOST_TRIALS_OF_ONE = 3
"""Largest number of trials of one layout. Repeated trials show whether a difference is noise."""
NOISE, NOISE_WEIGHT = 0.02, 2
"""``NOISE`` is the assumed standard deviation of the logarithm of the step time between equal runs. Repeated trials
measure this standard deviation too. In the estimate, the assumption has the weight of ``NOISE_WEIGHT`` repetitions."""
CRASHES = 2
"""A value of a knob (``candidates.KNOBS``) that has never worked is dropped after this many crashes."""
DRAWN = 256
"""Number of candidates in the random draws that estimate the probability of a better layout. These are the candidates
with the lowest lower bounds."""


@dataclass(frozen=True)
class Proposal:
    """The layout to try next, or the end of the search. ``index`` is the layout's index among the candidates, or None
    if the search ends. ``why`` gives the reason in words."""

    index: int | None
    why: str
    chance: float | None = None
    """Probability that some layout is better (see ``BETTER``) than the best trial. None before the first trial."""


def propose(candidates: Candidates, trials: Sequence[Trial], running: Sequence[int] = (), seed: int = 0) -> Proposal:
    """Propose the next trial, or the end of the search.

    Args:
        candidates: The candidates.
        trials: The trials that have ended.
        running: Indices of the candidates that are being tried at the moment.
        seed: Seed of the random draws that estimate probabilities.
    """
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
    chances = f"{chance:.1%} for new layouts and {again:.1%} for tried layouts"
    end = f"the chance that a layout is {BETTER:.0%} faster is {chances}"
    return Proposal(None, end, max(chance, again))


def _expected(belief: Posterior, index: int, best: int, chance: float) -> str:
    slower = math.exp(belief.mean[index] - belief.mean[best]) - 1
    than = f"expected {abs(slower):.1%} {'slower' if slower > 0 else 'faster'} than the best"
    return f"{than}; chance that a layout is {BETTER:.0%} faster: {chance:.0%}"


def posterior_of(candidates: Candidates, timed: Sequence[Trial]) -> Posterior:
    """Return the joint distribution of the step times of all candidates, given trials. Every trial in ``timed`` must
    have a step time."""
    noise = noise_between_runs(timed)
    return posterior(
        candidates,
        np.array([trial.index for trial in timed], dtype=int),
        np.array([trial.result.seconds for trial in timed]),
        np.array([math.hypot(noise, trial.result.noise) for trial in timed]),
    )


def noise_between_runs(timed: Sequence[Trial]) -> float:
    """Estimate the standard deviation of the logarithm of the step time between equal runs, from repeated trials and
    from the prior ``NOISE``."""
    logs: dict[int, list[float]] = {}
    for trial in timed:
        assert trial.result.seconds is not None
        logs.setdefault(trial.index, []).append(math.log(trial.result.seconds))
    squares = sum(float(np.var(each)) * len(each) for each in logs.values())
    degrees = sum(len(each) - 1 for each in logs.values())
    return math.sqrt((NOISE_WEIGHT * NOISE**2 + squares) / (NOISE_WEIGHT + degrees))


def incumbent(belief: Posterior, timed: Sequence[Trial]) -> int:
    """Return the index of the layout with the lowest expected step time among the layouts with a finished trial (with
    the outcome "done"). If no trial has finished, consider all layouts in ``timed``."""
    done = [trial for trial in timed if trial.result.outcome == "done"] or timed
    indices = sorted({trial.index for trial in done})
    return indices[int(np.argmin(belief.mean[indices]))]


def eligible(candidates: Candidates, trials: Sequence[Trial]) -> np.ndarray:
    """Return an array [n] that is True for layouts that may be tried or repeated.

    Such a layout meets these conditions:

    - It probably fits into memory.
    - No trial has run out of memory with a layout that is certain to need at most as much memory.
    - All of its trials had the outcome "done", and it has had fewer than ``MOST_TRIALS_OF_ONE`` trials.
    - None of its knob values is known to crash.
    """
    may = p_out(candidates, trials) <= MOST_LIKELY_OUT
    counts = Counter(trial.index for trial in trials)
    for trial in trials:
        if trial.result.outcome == "out of memory":
            may &= ~needs_as_much(candidates, trial.index)
        if trial.result.outcome != "done" or counts[trial.index] >= MOST_TRIALS_OF_ONE:
            may[trial.index] = False
    return np.asarray(may & ~_values_that_crash(candidates, trials))


def p_out(candidates: Candidates, trials: Sequence[Trial]) -> np.ndarray:
    """Return each layout's probability of running out of memory [n], given the trials."""
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
    """Return the probability that some layout is better (see ``BETTER``) than the layout ``best``.

    Args:
        belief: The joint distribution of the step times of all layouts.
        bound: The lower bound on each layout's step time [n]. Only the ``DRAWN`` layouts with the lowest bounds are
            considered. Layouts with an infinite bound are ignored.
        best: Index of the best layout.
        seed: Seed of the random draws.
    """
    lowest = np.argsort(bound, kind="stable")[:DRAWN]
    others = lowest[np.isfinite(bound[lowest]) & (lowest != best)]
    if not len(others):
        return 0.0
    drawn = belief.draws(np.append(others, best), seed)
    return float((drawn[:, :-1].min(axis=1) < drawn[:, -1] + math.log(1 - BETTER)).mean())


def doubt(candidates: Candidates, seed: int = 0) -> float:
    """Return the probability, before any trial, that some layout is better (see ``BETTER``) than the planner's first
    choice."""
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
        if worked:  # If no trial has worked, it is unknown which value causes the crashes.
            found |= np.isin(values, bad)
    return found
