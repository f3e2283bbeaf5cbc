"""Searches with pretended trials: failures are results, and a killed search continues without losing or repeating a
trial."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_trials import fake_search, true_seconds
from patience import PATIENCE

from fourfold.errors import UserError
from fourfold.planning.machines.machine import load_machine
from fourfold.reports.tune_report import summary_of
from fourfold.run_file.load import load_run
from fourfold.tuning.ledger import LEDGER
from fourfold.tuning.memory_margin import needs_as_much
from fourfold.tuning.tune_record import BEST_FILE, MACHINE_FILE, RECORD_FILE, finish

BASE = load_machine("dgx-a100")


def test_failures_are_results_and_the_search_continues(tmp_path: Path) -> None:
    kinds = ["crash", "hang", "done", "killed", "refused", "done", "out", "done", "done", "done"]
    given: dict[int, str] = {}

    def what_of(index: int) -> str:
        return given.setdefault(index, kinds[len(given)])

    search, tried = fake_search(tmp_path / "s", what_of, trials=10)
    search.run()
    outcomes = [trial.result.outcome for trial in search.ledger.trials()]
    expected = ["crashed", "hung", "done", "crashed", "refused", "done", "out of memory", "done", "done", "done"]
    assert outcomes == expected
    reasons = [trial.result.reason for trial in search.ledger.trials()]
    assert reasons[0] == "RuntimeError: the pump is broken"
    assert reasons[1].startswith("not done after")
    assert reasons[4] == "no such layout"
    assert "CUDA out of memory" in reasons[6]
    assert all(trial.result.wall_seconds > 0 for trial in search.ledger.trials())
    failed = [index for index, kind in given.items() if kind != "done"]
    assert not [index for index, times in Counter(tried).items() if index in failed and times > 1]


def test_a_memory_limit_ends_a_trial_and_what_needs_more_is_not_tried(tmp_path: Path) -> None:
    search, _ = fake_search(
        tmp_path / "s", lambda index: "grows" if not grown or index in grown else "done", trials=12, memory_limit=3e9
    )
    grown = {int(search.subject.candidates.seconds.argmin())}
    search.run()
    first, *others = search.ledger.trials()
    assert first.result.outcome == "out of memory"
    assert first.result.memory_bytes is not None and first.result.memory_bytes > 3e9
    assert "--memory-limit allows 3.00 GB" in first.result.reason
    forbidden = needs_as_much(search.subject.candidates, first.index)
    assert forbidden.sum() > 1
    assert others and not any(forbidden[trial.index] for trial in others)


def test_a_hopeless_trial_ends_early(tmp_path: Path) -> None:
    from fourfold.tuning.trial_run import HOPELESS, hopeless

    folder = tmp_path / "trial"
    (folder / "run").mkdir(parents=True)

    def after(*seconds: float) -> object:
        lines = [json.dumps({"step": n, "step_seconds": s}) for n, s in enumerate(seconds)]
        (folder / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return hopeless(folder, best=1.0)

    assert after(9.0) is None
    assert after(9.0, 2.0) is None
    assert after(9.0, 2.0, HOPELESS - 0.01) is None, "one step was quick enough"
    result = after(9.0, 2.0, 2.2)
    assert result is not None and result.outcome == "hopeless" and result.seconds == pytest.approx(2.1)
    assert hopeless(folder, best=None) is None


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("moment", [0, 1, 3])
def test_an_interrupted_search_continues(tmp_path: Path, moment: int) -> None:
    whole, tried_at_once = fake_search(tmp_path / "whole", trials=8)
    whole.run()

    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.extend([line] * line.startswith("trial"))
        if len(lines) == moment + 1:
            raise KeyboardInterrupt

    first, tried_before = fake_search(tmp_path / "s", report=interrupt, trials=8)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    kept = first.ledger.trials()
    assert len(kept) == moment + 1
    second, tried_after = fake_search(tmp_path / "s", trials=8)
    second.run()
    assert second.ledger.trials()[: moment + 1] == kept
    assert tried_before + tried_after == tried_at_once, "no trial is lost, and none repeated"


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from pathlib import Path
from fake_trials import FakeTrial, fake_search
import fourfold.tuning.tuner as tuner
tuner.POLL_SECONDS = 0.005

moment, calls = {moment!r}, 0
def die(*_):
    global calls
    calls += 1
    if calls == 3:
        os.kill(os.getpid(), signal.SIGKILL)

search, _ = fake_search(Path({folder!r}), trials=6)
if moment == "begun":  # in the ledger, but not started
    start = search.start
    search.start = lambda *place: (die(), start(*place))[1]
elif moment == "measured":  # done, but not in the ledger
    end = search.ledger.end
    search.ledger.end = lambda *result: (die(), end(*result))[1]
search.run()
"""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("moment", ["begun", "measured"])
def test_a_killed_search_loses_nothing_and_repeats_nothing(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "s"
    program = KILLED.format(path=[str(Path(__file__).parent)], moment=moment, folder=str(folder))
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    search, tried = fake_search(folder, trials=6)
    search.run()
    trials = search.ledger.trials()
    assert [trial.number for trial in trials] == list(range(6))
    assert len(tried) == {"begun": 4, "measured": 3}[moment]
    whole, tried_at_once = fake_search(tmp_path / "whole", trials=6)
    whole.run()
    assert [trial.index for trial in trials] == tried_at_once


def test_the_ledger_of_another_search_is_refused(tmp_path: Path) -> None:
    search, _ = fake_search(tmp_path / "s", trials=1)
    search.run()
    with pytest.raises(UserError, match=r"another search, with another memory \(--machine, --memory-limit\);"):
        fake_search(tmp_path / "s", memory=30e9)


def test_a_torn_line_of_the_ledger_is_dropped_and_another_file_refused(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    fake_search(folder, trials=2)[0].run()
    journal = folder / LEDGER
    with journal.open("ab") as file:
        file.write(b'{"end": 4, "resu')
    search, _ = fake_search(folder, trials=3)
    search.run()
    assert len(search.ledger.trials()) == 3
    assert journal.read_bytes().endswith(b"}\n")
    for text in (
        "not a ledger\n",
        '{"end": 0}\n',
        '{"search": 1}\n',
        '{"search": {}}\n{"end": 7, "result": {}}\n',
        "[]\n",
    ):
        journal.write_text(text)
        with pytest.raises(UserError, match="is not a ledger, or is damaged"):
            fake_search(folder, trials=3)


def test_interrupted_trials_wait_for_a_place(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    first, begun = fake_search(folder, what_of=lambda index: "hang", trials=4, at_once=4, timeout=PATIENCE)
    start = first.start

    def stop_at_the_last(*place: Any) -> Any:
        if len(begun) == 3:
            raise KeyboardInterrupt
        return start(*place)

    first.start = stop_at_the_last
    with pytest.raises(KeyboardInterrupt):
        first.run()
    again, tried = fake_search(folder, trials=4, at_once=1)
    begin = again.start

    def one_after_the_other(*place: Any) -> Any:
        assert len(again.ledger.trials()) == len(tried)
        return begin(*place)

    again.start = one_after_the_other
    again.run()
    assert len(tried) == 4 and set(begun) < set(tried)


def test_several_trials_at_once(tmp_path: Path) -> None:
    search, tried = fake_search(tmp_path / "s", trials=9, at_once=3)
    search.run()
    assert len(set(tried[:3])) == 3
    assert len(search.ledger.trials()) == 9


@pytest.mark.fast_cases(1)
def test_what_a_search_leaves(tmp_path: Path) -> None:
    order: list[int] = []

    def what_of(index: int) -> str:
        order.append(index)
        return "crash" if len(order) == 2 else "done"

    search, _ = fake_search(tmp_path / "s", what_of, trials=8)
    result = finish(search, BASE, search.run())
    candidates = search.subject.candidates
    truth = true_seconds(candidates)
    best = min((trial for trial in search.ledger.trials() if trial.result.seconds), key=lambda t: truth[t.index])
    run = load_run(tmp_path / "s" / BEST_FILE)
    assert run.parallel.x == candidates.knobs["x"][best.index]
    assert run.training.micro_batch_size == candidates.knobs["micro_batch_size"][best.index]
    assert run.training.train_steps == 100, "the run's own, not the trial's"
    assert load_machine(str(tmp_path / "s" / MACHINE_FILE)).efficiency
    assert json.loads((tmp_path / "s" / RECORD_FILE).read_text())["best"] == result.best

    summary = summary_of(result)
    assert "The search ran 8 trials: 7 done, 1 crashed. The search space has " in summary
    assert re.search(r"Trial 1, .*: crashed after \d+ s \(RuntimeError: the pump is broken\)", summary)
    assert f"The best layout, {result.best}, takes {result.best_seconds:.4g} s per step" in summary
    assert result.end.why in summary


def test_a_search_without_a_trial_that_works_says_why(tmp_path: Path) -> None:
    search, _ = fake_search(tmp_path / "s", lambda index: "crash", trials=3)
    with pytest.raises(UserError, match=r"none of 3 trials was done: 3 crashed \(RuntimeError: the pump is broken\)"):
        finish(search, BASE, search.run())
