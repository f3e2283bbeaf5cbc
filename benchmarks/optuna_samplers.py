"""Let Optuna's samplers choose layouts, to compare them with the tuner.

A layout is a set of Optuna parameters, one for each setting (knob) with several values. If a trial fails, Optuna is not
told that it failed, because samplers ignore such trials and would propose the same layout again. Instead, every result
has constraints ("runs", "memory", and "legal"). A value above 0 means that the constraint is violated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import optuna
from optuna.trial import TrialState

from fourfold.planning.workload import CP_METHODS, RECOMPUTE, SCHEDULES
from fourfold.tuning.candidates import Candidates
from fourfold.tuning.trial_result import Trial, TrialResult

Method = Literal["planner", "tpe", "random"]
"""The method that proposes layouts: fourfold's tuner ("planner"), or one of Optuna's samplers."""
NAMES: dict[str, tuple[str, ...]] = {"schedule": SCHEDULES, "cp_method": CP_METHODS, "recompute": RECOMPUTE}
"""Knobs whose values are indices, with the names that the indices stand for."""
FREE_DRAWS = 200
"""If a sampler proposes only illegal or already tried layouts this many times, an untried layout is chosen at
random."""
LEAST_EXCESS = 1e-3
"""If a trial ran out of memory, it exceeds the memory limit by at least this fraction of the limit."""


class Sampled:
    """A search among layouts. One of Optuna's samplers chooses the next layout to try."""

    def __init__(self, candidates: Candidates, method: Method, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
        self.candidates, self.study = candidates, optuna.create_study(sampler=samplers[method](seed=seed))
        columns = {
            name: [_named(name, value) for value in values.tolist()]
            for name, values in candidates.knobs.items()
            if (values != values[0]).any()
        }
        self.choices = {name: sorted(set(column)) for name, column in columns.items()}
        self._knobs = list(zip(*columns.values(), strict=True)) if columns else [()]
        self._index = {knobs: index for index, knobs in enumerate(self._knobs)}

    def trials(self) -> list[Trial]:
        """Return all trials that have a result, in the order of their numbers."""
        return [
            Trial(self._index_of(trial.params), TrialResult(**trial.user_attrs["result"]), trial.number)
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state.is_finished() and "result" in trial.user_attrs
        ]

    def unfinished(self) -> list[tuple[int, int]]:
        """Return the number and the candidate of every trial that has started but has no result yet."""
        return [
            (trial.number, self._index_of(trial.params))
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if trial.params.keys() == self.choices.keys()
        ]

    def begin(self, index: int, why: str) -> int:
        """Record that a candidate is being tried, and why. Return the number of the trial."""
        knobs = dict(zip(self.choices, self._knobs[index], strict=True))
        self.study.enqueue_trial(knobs)
        trial = self.study.ask()
        # If an earlier search was killed, its layouts may still be in Optuna's queue. Skip them.
        while self._suggested(trial) != self._knobs[index]:
            self._tell(trial, {}, None)
            trial = self.study.ask()
        trial.set_user_attr("why", why)
        return trial.number

    def draw(self, seed: int) -> tuple[int, int] | None:
        """Let the sampler choose a candidate, and record that its trial has started. Return the number of the trial and
        the candidate, or None if every candidate has been tried.

        If the sampler chooses an illegal layout, it is told so, and chooses again. If it chooses a layout that has a
        result, it is told the result, and chooses again. Neither counts as a trial.
        """
        known = {trial.index: trial.result for trial in self.trials()}
        running = {index for _, index in self.unfinished()}
        for _ in range(FREE_DRAWS):
            trial = self.study.ask()
            index = self._index.get(self._suggested(trial))
            if index is not None and index not in known and index not in running:
                return trial.number, index
            if index is None:
                self._tell(trial, {"legal": 1.0}, None)
            elif index in known:
                self._tell(trial, *self._outcome(known[index]))
            else:
                self._tell(trial, {}, None)
        untried = [index for index in range(self.candidates.count) if index not in known and index not in running]
        if not untried:
            return None
        index = int(np.random.default_rng([seed, len(known)]).choice(untried))
        return self.begin(index, "at random, as the sampler found nothing that is legal and new"), index

    def end(self, number: int, result: TrialResult) -> None:
        """Record the result of a trial."""
        (frozen,) = (trial for trial in self.study.get_trials(deepcopy=False) if trial.number == number)
        trial = optuna.trial.Trial(self.study, frozen._trial_id)
        trial.set_user_attr("result", asdict(result))
        # Optuna's dashboard has a column for each user attribute.
        for key in ("outcome", "reason"):
            trial.set_user_attr(key, getattr(result, key))
        self._tell(trial, *self._outcome(result))

    def _outcome(self, result: TrialResult) -> tuple[dict[str, float], float | None]:
        """Return the constraints of a result, and the step time in seconds (None if the trial failed)."""
        limit, used = float(self.candidates.machine.memory), result.memory_bytes
        if result.outcome == "out of memory":
            excess = 1.0 if used is None else max(used / limit - 1, LEAST_EXCESS)
            return {"runs": 0.0, "memory": excess}, None
        constraints = {"runs": 0.0 if result.seconds is not None else 1.0}
        if used is not None:
            constraints["memory"] = min(used / limit - 1, 0.0)
        return constraints, result.seconds

    def _tell(self, trial: optuna.Trial, constraints: Mapping[str, float], value: float | None) -> None:
        for name, excess in constraints.items():
            trial.set_constraint(name, excess)
        if value is None:
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, value)

    def _suggested(self, trial: optuna.Trial) -> tuple[Any, ...]:
        return tuple(trial.suggest_categorical(name, choices) for name, choices in self.choices.items())

    def _index_of(self, params: Mapping[str, Any]) -> int:
        return self._index[tuple(params[name] for name in self.choices)]


def _named(knob: str, value: float) -> int | bool | str:
    """Return a knob's value as the tuner's log (ledger) shows it: as a name, a boolean, or an integer."""
    if knob in NAMES:
        return NAMES[knob][int(value)]
    return value if isinstance(value, bool) else int(value)
