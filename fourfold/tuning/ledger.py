"""The ledger of a search: an Optuna study, in a journal that several machines can read and append to.

Layouts are Optuna's parameters, one for each knob that has a choice. Every result goes to Optuna with its constraints
("runs", "memory", "legal": at most 0 where it holds), so that a failure is never a bare FAIL, which samplers would
ignore and propose again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fourfold.data.files import writing
from fourfold.errors import UserError
from fourfold.extras import import_extra
from fourfold.parsing import parse_json
from fourfold.planning.workload import CP_METHODS, RECOMPUTE, SCHEDULES
from fourfold.tuning.candidates import Candidates
from fourfold.tuning.result import Result, Trial

if TYPE_CHECKING:
    import optuna

Method = Literal["planner", "tpe", "random"]
"""Who proposes: fourfold's proposer, or one of Optuna's samplers."""
NAMES: dict[str, tuple[str, ...]] = {"schedule": SCHEDULES, "cp_method": CP_METHODS, "recompute": RECOMPUTE}
"""Knobs whose values are indices, and what they stand for."""
FREE_DRAWS = 200
"""Draws of a sampler that are illegal, or known, before any untried layout is taken."""
LEAST_EXCESS = 1e-3
"""Share of the limit by which a trial that ran out of memory exceeded it, at least."""
JOURNAL = "ledger.journal"


class Ledger:
    """The trials of one search over some candidates."""

    def __init__(self, candidates: Candidates, study: optuna.Study) -> None:
        self.candidates, self.study = candidates, study
        columns = {
            name: [_named(name, value) for value in values.tolist()]
            for name, values in candidates.knobs.items()
            if (values != values[0]).any()
        }
        self.choices = {name: sorted(set(column)) for name, column in columns.items()}
        self._knobs = list(zip(*columns.values(), strict=True)) if columns else [()]
        self._index = {knobs: index for index, knobs in enumerate(self._knobs)}

    def trials(self) -> list[Trial]:
        """Every trial that ran and ended, by number."""
        return [
            Trial(self._index_of(trial.params), Result(**trial.user_attrs["result"]), trial.number)
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state.is_finished() and "result" in trial.user_attrs
        ]

    def reasons(self) -> dict[int, str]:
        """Why each trial was proposed, by number."""
        return {trial.number: trial.user_attrs.get("why", "") for trial in self.study.get_trials(deepcopy=False)}

    def unfinished(self) -> list[tuple[int, int]]:
        """Number and candidate of every trial that was begun and has no result: of a search that was killed."""
        from optuna.trial import TrialState

        return [
            (trial.number, self._index_of(trial.params))
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if trial.params.keys() == self.choices.keys()
        ]

    def begin(self, index: int, why: str) -> int:
        """Note that a candidate is tried, and why; returns the trial's number."""
        knobs = dict(zip(self.choices, self._knobs[index], strict=True))
        self.study.enqueue_trial(knobs)
        trial = self.study.ask()
        while self._suggested(trial) != self._knobs[index]:  # enqueued by a search that was killed at that moment
            self._tell(trial, {}, None)
            trial = self.study.ask()
        trial.set_user_attr("why", why)
        return trial.number

    def draw(self, seed: int) -> tuple[int, int] | None:
        """Note the sampler's choice as begun: its number and its candidate; None where every candidate was tried.

        Illegal choices cost nothing, and neither do known ones, whose results the sampler gets again.
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

    def end(self, number: int, result: Result) -> None:
        """Note a trial's result."""
        import optuna

        (frozen,) = (trial for trial in self.study.get_trials(deepcopy=False) if trial.number == number)
        trial = optuna.trial.Trial(self.study, frozen._trial_id)
        trial.set_user_attr("result", asdict(result))
        for key in ("outcome", "reason"):  # for the dashboard, which shows them in columns
            trial.set_user_attr(key, getattr(result, key))
        self._tell(trial, *self._outcome(result))

    def _outcome(self, result: Result) -> tuple[dict[str, float], float | None]:
        """The constraints of a result, and its value."""
        limit, used = self.candidates.machine.memory, result.memory_bytes
        if result.outcome == "out of memory":
            excess = 1.0 if used is None else max(used / limit - 1, LEAST_EXCESS)
            return {"runs": 0.0, "memory": excess}, None
        constraints = {"runs": 0.0 if result.seconds is not None else 1.0}
        if used is not None:
            constraints["memory"] = min(used / limit - 1, 0.0)
        return constraints, result.seconds

    def _tell(self, trial: optuna.Trial, constraints: Mapping[str, float], value: float | None) -> None:
        from optuna.trial import TrialState

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


def open_ledger(folder: Path, candidates: Candidates, method: Method, seed: int, what: Mapping[str, str]) -> Ledger:
    """Open, or begin, the ledger in a folder; raises ``UserError`` where it is of another search.

    ``what``: texts in which two searches differ where their trials must not be mixed, by name.
    """
    optuna = import_optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    class Journal(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            with writing(folder / JOURNAL):
                super().append_logs(logs)

    _drop_torn_line(folder / JOURNAL)
    study = optuna.create_study(
        storage=JournalStorage(Journal(str(folder / JOURNAL))),
        study_name="tune",
        sampler=sampler_of(method, seed),
        load_if_exists=True,
    )
    before = study.user_attrs.get("search")
    if before is None:
        study.set_user_attr("search", dict(what))
    elif differing := [name for name, text in what.items() if before.get(name) != text]:
        raise UserError(
            f"{folder} holds the trials of another search, with another {' and '.join(differing)}; choose another "
            "--out, or remove the folder"
        )
    return Ledger(candidates, study)


def _drop_torn_line(journal: Path) -> None:
    """Remove the end of a journal whose writer was killed; raises ``UserError`` for a file that is no journal."""
    if not journal.exists():
        return
    with writing(journal):
        content = journal.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(journal, len(whole))
    try:
        for line in whole.splitlines():
            parse_json(line)
    except ValueError:
        raise UserError(f"{journal} is damaged, or no ledger; choose another --out, or remove the file") from None


def ledger_in_memory(candidates: Candidates, method: Method, seed: int) -> Ledger:
    """A ledger that ends with its process."""
    return Ledger(candidates, import_optuna().create_study(sampler=sampler_of(method, seed)))


def sampler_of(method: Method, seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's sampler of a method; the planner's proposals do not come from it."""
    from optuna.samplers import RandomSampler, TPESampler

    return TPESampler(seed=seed) if method == "tpe" else RandomSampler(seed=seed)


def import_optuna() -> Any:
    """Import Optuna, and have it print warnings only."""
    optuna = import_extra("optuna", "tune", "a search needs")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _named(knob: str, value: float) -> int | bool | str:
    """A knob's value as it stands in the ledger."""
    if knob in NAMES:
        return NAMES[knob][int(value)]
    return value if isinstance(value, bool) else int(value)
