"""Print the result of ``fourfold tune`` in the terminal: a table of the trials, and a summary."""

from collections import Counter

from rich.console import Console

from fourfold.reports.numbers import counted
from fourfold.reports.tables import print_table
from fourfold.tuning.tune_record import TrialRecord, TuneRecord

COLUMNS = ("trial", "layout", "result", "s/step", "predicted", "GB")


def tune_tables(result: TuneRecord) -> None:
    """Print a table of the trials with the fastest trial first. Then print the summary and the paths of the written
    files."""
    order = sorted(result.trials, key=lambda trial: (trial.result.seconds is None, trial.result.seconds or 0))
    title = f"{result.name} on {counted(result.gpus, 'device')} of {result.machine}"
    print_table(title, COLUMNS, [_row(trial) for trial in order], words=("layout", "result"))
    console = Console(soft_wrap=True, highlight=False)
    console.print(summary_of(result), markup=False)
    for name, path in result.files.items():
        console.print(f"{name}: {path}", markup=False)


def summary_of(result: TuneRecord) -> str:
    """Return the summary of a search as one paragraph. It says how many trials ran, which layout is the fastest and by
    how much, how accurate the calibrated planner is, why the search ended, and why trials failed."""
    counts = Counter(trial.result.outcome for trial in result.trials)
    sentences = [
        f"The search ran {counted(len(result.trials), 'trial')}: "
        f"{', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}. "
        f"The search space has {counted(result.layouts, 'legal layout')}.",
        f"The best layout, {result.best}, takes {result.best_seconds:.4g} s per step{_against_others(result)}.",
    ]
    if (error := result.held_out_error) is not None:
        sentences.append(f"The calibrated planner's error on trials held out of its fit is {error:.0%}.")
    sentences.append(f"The search ended because {result.end.why}.")
    for trial in result.trials:
        if trial.result.outcome != "done":
            why = f" ({trial.result.reason})" if trial.result.reason else ""
            took = f"{trial.result.outcome} after {trial.result.wall_seconds:.0f} s{why}"
            sentences.append(f"Trial {trial.number}, {trial.layout}: {took}.")
    return " ".join(sentences)


def _row(trial: TrialRecord) -> list[str]:
    result = trial.result
    seconds = "" if result.seconds is None else f"{result.seconds:.4g}"
    memory = "" if result.memory_bytes is None else f"{result.memory_bytes / 1e9:.2f}"
    return [str(trial.number), trial.layout, result.outcome, seconds, f"{trial.predicted_seconds:.4g}", memory]


def _against_others(result: TuneRecord) -> str:
    others = []
    if result.predicted_first == result.best:
        others.append("the planner's first choice")
    elif result.predicted_first_seconds is not None:
        others.append(_compared(result.best_seconds, result.predicted_first_seconds, "of the planner's first choice"))
    if result.own_seconds is not None and result.own != result.best:
        others.append(_compared(result.best_seconds, result.own_seconds, "expected of the run file's own layout"))
    return f" ({'; '.join(others)})" if others else ""


def _compared(best: float, other: float, what: str) -> str:
    change = 1 - best / other
    return f"{abs(change):.1%} {'less' if change >= 0 else 'more'} than the {other:.4g} s {what}"
