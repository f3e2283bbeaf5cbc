"""Write the result of a search: its trials, the best layout, and the calibration of the machine."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fourfold.data.atomic_files import write_output
from fourfold.errors import UserError
from fourfold.planning.calibration.machine_fit import FittedMachine, fit_machine
from fourfold.planning.machines.machine import Machine
from fourfold.planning.machines.write import machine_toml
from fourfold.planning.search.fastest import MAX_P_OUT_OF_MEMORY
from fourfold.planning.search.plan import describe_layout
from fourfold.run_file.dump import to_toml
from fourfold.training.metrics import METRICS_FILE
from fourfold.tuning.candidates import Candidates
from fourfold.tuning.propose import Proposal, p_out, posterior_of
from fourfold.tuning.trial_result import Trial, TrialResult
from fourfold.tuning.trial_run import RUN_FOLDER
from fourfold.tuning.tuner import TRIALS, Search, best_of

BEST_FILE, MACHINE_FILE, RECORD_FILE = "best.toml", "machine.toml", "tune.json"


@dataclass(frozen=True)
class TrialRecord:
    """One trial in the record of a search."""

    number: int
    layout: str
    knobs: dict[str, float]
    """The layout's value of each knob (``candidates.KNOBS``)."""
    predicted_seconds: float
    """Predicted step time in seconds, with the constants that the search started with."""
    result: TrialResult
    why: str
    """Why the trial was proposed."""


@dataclass(frozen=True)
class TuneRecord:
    """The full result of a search."""

    name: str
    gpus: int
    machine: str
    memory: float
    """Memory of a device in bytes: the value of --memory-limit if it is given, and the machine file's value
    otherwise."""
    layouts: int
    """Number of candidates: legal layouts that may fit into memory."""
    trials: list[TrialRecord]
    best: str
    """The layout with the lowest expected step time, in one line."""
    best_seconds: float
    """Measured step time of the best layout in seconds, as the median over its trials."""
    predicted_first: str
    """The layout that the planner would have chosen without trials."""
    predicted_first_seconds: float | None
    """Measured step time of ``predicted_first`` in seconds, as the median over its trials. None if it has no finished
    trial."""
    own: str
    """The run file's layout. Empty if it is not a candidate."""
    own_seconds: float | None
    """Expected step time of the run file's layout in seconds, from the model that is fitted to all trials. None if this
    layout is not a candidate."""
    end: Proposal
    """The last proposal, which says why the search ended."""
    held_out_error: float | None
    """Mean absolute relative error of the calibrated planner on trials that were held out of its fit. None if no trial
    was held out."""
    files: dict[str, str]
    """Paths of the files that the search has written. The keys are "run file" and "machine file"."""


def finish(search: Search, base: Machine, end: Proposal) -> TuneRecord:
    """Write the result of a search into its folder, and return the record. There are three files: the best layout as a
    run file, the calibrated machine file, and the record.

    Args:
        search: The search.
        base: The machine as its file describes it.
        end: The last proposal, which says why the search ended.

    Raises:
        UserError: No trial has finished, or a file cannot be written.
    """
    trials = search.ledger.trials()
    best = best_of(search.subject.candidates, trials)
    if best is None:
        raise UserError(_nothing_done(search, trials, end))
    done = [f"{trial.number:04d}" for trial in trials if trial.result.outcome == "done"]
    metrics = [search.folder / TRIALS / number / RUN_FOLDER / METRICS_FILE for number in done]
    fitted = fit_machine(metrics, base, search.folder.name)
    files = {"run file": search.folder / BEST_FILE, "machine file": search.folder / MACHINE_FILE}
    record = _record(search, trials, best, end, fitted, {name: str(path) for name, path in files.items()})
    effort = f"trials: {len(trials)}, devices: {record.gpus}"
    comment = f"# The fastest layout of a search: {record.best_seconds:.4g} s per step ({effort}).\n"
    write_output(files["run file"], comment + to_toml(search.subject.run(best)))
    title = f"{base.name}, calibrated on {fitted.rows} trials of `fourfold tune`"
    write_output(files["machine file"], machine_toml(fitted.machine, title, base))
    write_output(search.folder / RECORD_FILE, json.dumps(asdict(record), indent=1) + "\n")
    return record


def _nothing_done(search: Search, trials: Sequence[Trial], end: Proposal) -> str:
    counts = Counter((trial.result.outcome, trial.result.reason) for trial in trials)
    if not counts:
        return f"no trial was run: {end.why}"
    (outcome, reason), times = counts.most_common(1)[0]
    logs = search.folder / TRIALS
    return f"none of {len(trials)} trials was done: {times} {outcome} ({reason}); their logs are in {logs}"


def _record(
    search: Search, trials: Sequence[Trial], best: int, end: Proposal, fitted: FittedMachine, files: dict[str, str]
) -> TuneRecord:
    candidates, request = search.subject.candidates, search.subject.request
    done = [trial for trial in trials if trial.result.outcome == "done"]
    belief = posterior_of(candidates, [trial for trial in trials if trial.result.seconds is not None])
    # Pass no trials, because this is the choice that the planner would make without trials.
    fits = p_out(candidates, []) <= MAX_P_OUT_OF_MEMORY
    first, own = int(np.argmin(np.where(fits, candidates.seconds, np.inf))), _own_index(search)
    best_seconds = _median(done, best)
    assert best_seconds is not None
    return TuneRecord(
        name=request.name, gpus=request.gpus, machine=search.subject.machine.name,
        memory=float(candidates.machine.memory), layouts=candidates.count, trials=_trial_records(search, trials),
        best=layout_of(candidates, best), best_seconds=best_seconds,
        predicted_first=layout_of(candidates, first), predicted_first_seconds=_median(done, first),
        own="" if own is None else layout_of(candidates, own),
        own_seconds=None if own is None else float(np.exp(belief.mean[own])),
        end=end, held_out_error=fitted.held_out["mean_abs_error"], files=files,
    )  # fmt: skip


def _trial_records(search: Search, trials: Sequence[Trial]) -> list[TrialRecord]:
    candidates, records = search.subject.candidates, []
    for trial in trials:
        layout, why = layout_of(candidates, trial.index), search.ledger.reason(trial.number)
        knobs = {name: float(values[trial.index]) for name, values in candidates.knobs.items()}
        predicted = float(candidates.seconds[trial.index])
        records.append(TrialRecord(trial.number, layout, knobs, predicted, trial.result, why))
    return records


def _median(done: Sequence[Trial], index: int) -> float | None:
    """Return the median step time of a layout's finished trials in seconds, or None if there are none."""
    seconds = [trial.result.seconds for trial in done if trial.index == index and trial.result.seconds is not None]
    return float(np.median(seconds)) if seconds else None


def layout_of(candidates: Candidates, index: int) -> str:
    """Describe a candidate's layout in one line."""
    return describe_layout(candidates.point(index))


def _own_index(search: Search) -> int | None:
    """Return the index of the run file's layout among the candidates, or None if it is not a candidate."""
    own, candidates = search.subject.request.own, search.subject.candidates
    if own is None:
        return None
    same = np.ones(candidates.count, dtype=bool)
    for name, values in candidates.knobs.items():
        same &= values == getattr(own.layout, name)
    return int(np.argmax(same)) if same.any() else None
