"""Run a search: propose a layout, run it as a trial, and record the result. Repeat this until a better layout is
unlikely."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import locked_folder, write_output, writing
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.planned_run import planned_run
from fourfold.planning.request import Request
from fourfold.planning.search.plan import Prediction, predict
from fourfold.run_file.dump import to_toml
from fourfold.tuning.candidates import Candidates
from fourfold.tuning.ledger import Ledger
from fourfold.tuning.propose import BETTER, Proposal, doubt, incumbent, posterior_of, propose
from fourfold.tuning.running_trial import RunningTrial
from fourfold.tuning.trial_process import TrialProcess, cancel
from fourfold.tuning.trial_result import Trial, TrialResult
from fourfold.tuning.trial_run import RUN_FOLDER, measured, trial_run

RUN_FILE, TRIALS = "run.toml", "trials"
POLL_SECONDS = 0.2

Start = Callable[[Path, Path, int], TrialProcess]
"""Function that starts a trial, given the path of its run file, its folder, and its slot among the concurrent
trials."""


@dataclass(frozen=True)
class Settings:
    """Settings of a search.

    - trials: largest number of trials in the folder, including trials of earlier calls.
    - minutes: time after which this call starts no new trial. None means no limit.
    - at_once: number of concurrent trials. With 0, ``search_for`` determines it.
    - steps: number of measured steps per trial, after the warm-up.
    - timeout: seconds after which a trial counts as hung.
    - memory_limit: bytes that one process or device may use. None means no limit.
    - seed: seed of the search's random draws.
    """

    trials: int
    minutes: float | None = None
    at_once: int = 1
    steps: int = 8
    timeout: float = 600.0
    memory_limit: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """The input of a search: a run file's model and step, the candidate layouts, and the planner's constants for the
    machine."""

    request: Request
    candidates: Candidates
    constants: Constants
    on_gpu: bool

    @property
    def machine(self) -> Machine:
        """Return the machine that the candidates are predicted for."""
        return self.candidates.machine

    def prediction(self, index: int) -> Prediction:
        """Return the planner's prediction for the candidate at ``index``."""
        return predict(self.candidates.point(index), self.machine, self.constants)

    def run(self, index: int) -> RunConfig:
        """Return the run file's run with the layout of the candidate at ``index``."""
        return planned_run(self.request, self.prediction(index))

    def fingerprint(self) -> dict[str, str]:
        """Return hashes that identify this search. The keys are the names that error messages use.

        Only searches with equal hashes may share a ledger.
        """
        assert self.request.run is not None
        knobs = {name: values.tolist() for name, values in self.candidates.knobs.items()}
        whole = {
            "run file": to_toml(self.request.run),
            "memory (--machine, --memory-limit)": float(self.machine.memory),
            "layouts (--space, --nproc, --machine, or fourfold's version)": knobs,
        }
        return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in whole.items()}


class Search:
    """One search and its folder. A search that was interrupted resumes from its ledger."""

    def __init__(
        self, subject: Subject, settings: Settings, folder: Path, start: Start, report: Callable[[str], None]
    ) -> None:
        self.subject, self.settings, self.folder = subject, settings, folder
        with self._locked():
            self.ledger = Ledger(folder, subject.fingerprint())
        self.start, self._report = start, report
        self._running: list[RunningTrial] = []
        self._interrupted: list[tuple[int, int]] = []
        """Number and candidate index of each interrupted trial. These trials are started again."""
        self._began = time.monotonic()

    def run(self) -> Proposal:
        """Try layouts until the search ends.

        The returned proposal has no layout. Its ``why`` says why the search ended.
        """
        with self._locked():
            self._report(self._doubt())
            try:
                self._take_up()
                while True:
                    self._note_results()
                    end = self._fill()
                    if end is not None and not self._running:
                        return end
                    time.sleep(POLL_SECONDS)
            finally:
                for attempt in self._running:
                    attempt.process.end()

    def _locked(self) -> AbstractContextManager[None]:
        return locked_folder(self.folder, f"another search runs in {self.folder}; wait for it, or choose another --out")

    def _doubt(self) -> str:
        chance = doubt(self.subject.candidates, self.settings.seed)
        return (
            f"{self.subject.candidates.count} legal layouts; before any trial, the chance that one of them is "
            f"{BETTER:.0%} faster than the planner's first choice is {chance:.0%}"
        )

    def _take_up(self) -> None:
        """Take over the trials without a result that a killed search has left. If such a trial has finished in the
        meantime, record its result. Otherwise the trial will start again."""
        for number, index in self.ledger.unfinished():
            folder = self._folder_of(number)
            run = trial_run(self.subject.run(index), folder, self.settings.steps)
            result = measured(folder, run, self.subject.machine, self.subject.on_gpu)
            if result is not None:
                self._note(number, index, result)
            else:
                cancel(folder)
                shutil.rmtree(folder, ignore_errors=True)
                self._interrupted.append((number, index))

    def _fill(self) -> Proposal | None:
        """Start trials until all slots are taken, and return None. If no further trial should start, return the reason
        as a proposal without a layout."""
        while len(self._running) < self.settings.at_once:
            trials = self.ledger.trials()
            if len(trials) + len(self._running) >= self.settings.trials:
                return Proposal(None, f"it reached the limit of {self.settings.trials} trials (--trials)")
            if self.settings.minutes is not None and time.monotonic() - self._began > 60 * self.settings.minutes:
                return Proposal(None, f"the budget of {self.settings.minutes:g} minutes is spent")
            if self._interrupted:
                self._begin(*self._interrupted.pop(0))
                continue
            running = [attempt.index for attempt in self._running]
            proposal = propose(self.subject.candidates, trials, running, self.settings.seed)
            if proposal.index is None:
                return proposal
            self._begin(self.ledger.begin(proposal.index, proposal.why), proposal.index)
        return None

    def _begin(self, number: int, index: int) -> None:
        folder = self._folder_of(number)
        run = trial_run(self.subject.run(index), folder, self.settings.steps)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(folder / RUN_FOLDER, ignore_errors=True)
        write_output(folder / RUN_FILE, to_toml(run))
        slot = min(set(range(self.settings.at_once)) - {attempt.slot for attempt in self._running})
        process = self.start(folder / RUN_FILE, folder, slot)
        self._running.append(
            RunningTrial(number, index, slot, run, folder, process, self.subject.machine, self.subject.on_gpu,
                    self.settings.timeout, self.settings.memory_limit)
        )  # fmt: skip

    def _note_results(self) -> None:
        """Record the trials that have ended since the last call."""
        done = [trial.result for trial in self.ledger.trials() if trial.result.outcome == "done"]
        best = min((result.seconds for result in done if result.seconds is not None), default=None)
        longest = max((result.wall_seconds for result in done), default=None)
        for attempt in list(self._running):
            result = attempt.result(best, longest)
            if result is not None:
                self._running.remove(attempt)
                self._note(attempt.number, attempt.index, result)

    def _note(self, number: int, index: int, result: TrialResult) -> None:
        self.ledger.end(number, result)
        what = "" if result.seconds is None else f" {result.seconds:.4g} s per step"
        why = f" ({result.reason})" if result.reason else ""
        layout = self.subject.prediction(index).describe()
        self._report(f"trial {number}: {layout}: {result.outcome}{what}{why}")

    def _folder_of(self, number: int) -> Path:
        return self.folder / TRIALS / f"{number:04d}"


def best_of(candidates: Candidates, trials: Sequence[Trial]) -> int | None:
    """Return the index of the layout with the lowest expected step time among the layouts with a finished trial. Return
    None if no trial has finished."""
    done = [trial for trial in trials if trial.result.outcome == "done"]
    return incumbent(posterior_of(candidates, done), done) if done else None
