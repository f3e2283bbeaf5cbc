"""Sentences about the result of a search."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from fourfold.reports.numbers import counted

if TYPE_CHECKING:
    from fourfold.tuning.sensitivity import Sensitivity
    from fourfold.tuning.tune_record import TuneRecord

NAMED = 3
"""Knobs that the paragraph names."""


def summary_of(result: TuneRecord) -> str:
    """One paragraph: what was tried, what is best and by how much, which knobs matter, and how sure that is."""
    sentences = [
        f"Of {counted(result.layouts, 'legal layout')}, {counted(len(result.trials), 'trial')} "
        f"{'was' if len(result.trials) == 1 else 'were'} made: {outcomes_of(result)}.",
        f"The best, {result.best}, takes {result.best_seconds:.4g} s a step{_against_others(result)}.",
        _of_knobs(result.planner),
    ]
    error = result.planner.error
    if error is not None:
        sentences.append(f"The calibrated planner's error on trials held out of its fit is {error:.0%}.")
    if result.trees is not None:
        first = next(iter(result.trees.importance), None)
        sentences.append(
            f"Trees that are fitted to {counted(result.trees.layouts, 'layout')} alone, with an error of "
            f"{math.expm1(result.trees.error or 0):.0%} on those held out, put {first} first."
        )
    sentences.append(f"The search ended because {result.end.why}.")
    return " ".join(sentence for sentence in sentences if sentence)


def outcomes_of(result: TuneRecord) -> str:
    counts = Counter(trial.result.outcome for trial in result.trials)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


def ended_early(result: TuneRecord) -> list[str]:
    """A sentence for each trial that was not done."""
    return [
        f"Trial {trial.number}, {trial.layout}: {trial.result.outcome} after {trial.result.wall_seconds:.0f} s"
        + (f" ({trial.result.reason})" if trial.result.reason else "")
        for trial in result.trials
        if trial.result.outcome != "done"
    ]


def _against_others(result: TuneRecord) -> str:
    others = []
    if result.predicted_first_seconds is not None and result.predicted_first != result.best:
        others.append(_compared(result.best_seconds, result.predicted_first_seconds, "the planner's first choice"))
    if result.own_seconds is not None and result.own != result.best:
        others.append(_compared(result.best_seconds, result.own_seconds, "expected of the run file's own layout"))
    if result.predicted_first == result.best:
        others.append("the planner's first choice")
    return f" ({'; '.join(others)})" if others else ""


def _compared(best: float, other: float, what: str) -> str:
    change = 1 - best / other
    return f"{abs(change):.1%} {'less' if change >= 0 else 'more'} than the {other:.4g} s {_of(what)}"


def _of(what: str) -> str:
    return what if what.startswith("expected") else f"of {what}"


def _of_knobs(explained: Sensitivity) -> str:
    if not explained.of_best:
        return ""
    whole = math.exp(sum(explained.of_best.values()))
    ordered = sorted(explained.of_best.items(), key=lambda item: item[1])
    named = [f"{name} ({math.expm1(value):+.0%})" for name, value in ordered if value < 0][:NAMED]
    faster = f"By the calibrated planner it takes {whole:.0%} of the time of the mean layout (geometric)"
    return f"{faster}, thanks to {', '.join(named)}." if named else f"{faster}."
