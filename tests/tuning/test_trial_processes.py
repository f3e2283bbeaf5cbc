"""Real trials: `fourfold train` in its own processes, and as jobs of a stand-in for SLURM."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from command_line import Cli, one_sentence
from patience import PATIENCE
from tiny_corpus import run_file

from fourfold.config.run import RunConfig
from fourfold.launch.job_scripts.slurm_script import SlurmJob
from fourfold.launch.job_scripts.slurm_site import parse_site
from fourfold.planning.machines.machine import load_machine
from fourfold.run_file.dump import to_toml
from fourfold.run_file.load import load_run
from fourfold.tuning.running_trial import RunningTrial
from fourfold.tuning.start_search import search_for
from fourfold.tuning.trial_process import LocalTrial, SlurmTrial, TrialProcess
from fourfold.tuning.trial_result import TrialResult
from fourfold.tuning.trial_run import trial_run
from fourfold.tuning.tune_record import finish
from fourfold.tuning.tuner import Settings

LAPTOP = load_machine("laptop")


def tiny_trial(folder: Path, prefix: str, steps: int = 2, **changes: object) -> tuple[RunConfig, Path]:
    """Return the run of a trial and its folder, which has the run file."""
    run = load_run(run_file(folder, prefix, training__device="cpu", **changes))
    trial = folder / "trial"
    trial.mkdir()
    short = trial_run(run, trial, steps)
    (trial / "run.toml").write_text(to_toml(short))
    return short, trial


def attempt_of(process: TrialProcess, run: RunConfig, trial: Path, timeout: float, limit: float | None) -> RunningTrial:
    return RunningTrial(0, 0, 0, run, trial, process, LAPTOP, False, timeout, limit)


def result_of(attempt: RunningTrial) -> TrialResult:
    while (result := attempt.result(None, None)) is None:
        time.sleep(0.02)
    return result


def local(run: RunConfig, trial: Path, timeout: float = PATIENCE, limit: float | None = None) -> TrialResult:
    process = LocalTrial(trial / "run.toml", trial, {"OMP_NUM_THREADS": "1"})  # leave the other cores to other tests
    result = result_of(attempt_of(process, run, trial, timeout, limit))
    assert process.exit_code() is not None, "nothing is left behind"
    return result


def test_a_trial_is_a_few_steps_of_a_run_of_its_own(tmp_path: Path, prefix: str) -> None:
    run, trial = tiny_trial(
        tmp_path, prefix, checkpoint__interval=1, validation__interval=1, sample__prompt="a", checks__spike="roll_back"
    )
    assert run.training.train_steps == 5
    result = local(run, trial)
    assert result.outcome == "done", result.reason
    assert result.seconds is not None and result.seconds > 0
    assert result.memory_bytes is not None and 5e7 < result.memory_bytes < 5e9
    assert result.wall_seconds > result.seconds
    assert not list(trial.rglob("*.safetensors")) and not (trial / "run" / "sample.txt").exists()


def test_a_trial_runs_no_tasks(tmp_path: Path, prefix: str) -> None:
    run = load_run(run_file(tmp_path, prefix, evaluation__interval=1, evaluation__tasks=["hellaswag"]))
    assert run.evaluation.tasks and not trial_run(run, tmp_path, 2).evaluation.tasks


def test_a_process_beyond_its_memory_is_ended(tmp_path: Path, prefix: str) -> None:
    run, trial = tiny_trial(tmp_path, prefix)
    result = local(run, trial, limit=2e7)  # Python with NumPy needs more memory than this limit
    assert result.outcome == "out of memory"
    assert result.memory_bytes is not None and result.memory_bytes > 2e7


def test_a_trial_that_takes_too_long_is_ended(tmp_path: Path, prefix: str) -> None:
    run, trial = tiny_trial(tmp_path, prefix)
    result = local(run, trial, timeout=0)
    assert result.outcome == "hung"
    assert result.reason == "not done after 0 s, with 0 steps taken"


def test_a_run_that_is_refused_says_why(tmp_path: Path, prefix: str) -> None:
    run, trial = tiny_trial(tmp_path, prefix)
    text = (trial / "run.toml").read_text().replace("micro_batch_size = 2", "micro_batch_size = 3")
    (trial / "run.toml").write_text(text)
    result = local(run, trial)
    assert result.outcome == "refused"
    assert "micro_batch_size" in result.reason


@pytest.mark.slow
def test_a_search_continues_when_a_worker_is_killed(tmp_path: Path, prefix: str) -> None:
    """Run three real trials of two processes each. One worker of the first trial gets SIGKILL."""
    path = run_file(tmp_path, prefix, training__device="cpu", parallel__dp=2)
    killed: list[int] = []

    class Killed(LocalTrial):
        """The first trial, which loses a worker once both are there."""

        def exit_code(self) -> int | None:
            while not killed and super().exit_code() is None:
                workers = [worker for child in children_of(self._process.pid) for worker in children_of(child)]
                if len(workers) == 2:
                    killed.append(workers[-1])
                    os.kill(workers[-1], signal.SIGKILL)
                time.sleep(0.01)
            return super().exit_code()

    search, base = search_for(
        path,
        machine_name="laptop",
        space=["recompute=none"],
        folder=tmp_path / "s",
        settings=Settings(trials=3, steps=2),
        report=lambda line: None,
    )
    search.start = lambda run, folder, slot: Killed(run, folder, {"OMP_NUM_THREADS": "1"})
    result = finish(search, base, search.run())
    outcomes = [trial.result.outcome for trial in result.trials]
    assert outcomes[0] == "crashed" and "SIGKILL" in result.trials[0].result.reason, result.trials[0].result
    assert outcomes[1] == "done" and len(outcomes) == 3


def children_of(process: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


SBATCH = """#!{python}
import pathlib, re, subprocess, sys
script = sys.argv[-1]
assert sys.argv[1:-1] == ["--wait"]
print("41", flush=True)
lines = pathlib.Path(script).read_text().splitlines()
output = re.search(r"--output=(.*)", "\\n".join(line for line in lines if line.startswith("#SBATCH")))[1]
with open(output, "w") as log:
    sys.exit(subprocess.run(["bash", script], stdout=log, stderr=subprocess.STDOUT).returncode)
"""
"""A stand-in for sbatch that runs the job at once."""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.slow
def test_a_trial_may_be_a_job(tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(tmp_path / "bin", monkeypatch, sbatch=SBATCH.format(python=sys.executable), srun=SRUN)
    run, trial = tiny_trial(tmp_path, prefix)
    site = parse_site("gpus_per_node = 1", where="here.toml")
    process = SlurmTrial(trial / "run.toml", trial, site, SlurmJob(1, "00:20:00"))
    result = result_of(attempt_of(process, run, trial, PATIENCE, None))
    assert result.outcome == "done", result.reason
    script = (trial / "job.sh").read_text()
    assert "#SBATCH --no-requeue" in script and "crashes >= 0" in script


def test_a_job_in_the_queue_does_not_hang_and_is_cancelled_at_the_end(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = "#!/bin/bash\necho '41;cluster'\nexec sleep 3600\n"
    on_path(tmp_path / "bin", monkeypatch, sbatch=waiting, scancel=f"#!/bin/bash\necho $1 > {tmp_path}/cancelled\n")
    run, trial = tiny_trial(tmp_path, prefix)
    site = parse_site("gpus_per_node = 1", where="here.toml")
    process = SlurmTrial(trial / "run.toml", trial, site, SlurmJob(1))
    attempt = attempt_of(process, run, trial, timeout=0.0, limit=None)
    for _ in range(10):
        assert attempt.result(None, None) is None, "its time has not begun"
        time.sleep(0.05)
    process.end()
    name = (tmp_path / "cancelled").read_text().strip().removeprefix("--name=")
    assert f"#SBATCH --job-name={name}\n" in (trial / "job.sh").read_text()


def test_a_job_that_is_not_accepted_says_why(tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(tmp_path / "bin", monkeypatch, sbatch="#!/bin/bash\necho 'sbatch: error: no such account' >&2\nexit 1\n")
    run, trial = tiny_trial(tmp_path, prefix)
    site = parse_site("gpus_per_node = 1", where="here.toml")
    result = result_of(attempt_of(SlurmTrial(trial / "run.toml", trial, site, SlurmJob(1)), run, trial, PATIENCE, None))
    assert (result.outcome, result.reason) == ("crashed", "sbatch: error: no such account")


@pytest.mark.slow
def test_a_search_from_the_command_line(tmp_path: Path, prefix: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real trials of one process: the second call continues the search, and the third has nothing left to do."""
    monkeypatch.chdir(tmp_path)
    run_file(tmp_path, prefix, training__device="cpu")
    command = ["tune", "run.toml", "--space", "micro_batch_size=1,2,4", "--space", "recompute=none", "--steps", 2]
    code, output, errors = cli(*command, "--trials", 1, "--json")
    assert code == 0, errors
    assert "trial 0: one GPU" in errors
    code, output, errors = cli(*command, "--trials", 2)
    assert code == 0, errors
    assert "The search ran 2 trials" in output.replace("\n", " ")
    assert errors.count("\ntrial ") == 1, "the first is known"
    best = load_run(tmp_path / "tune-run" / "best.toml")
    assert best.training.train_steps == 8 and best.name == "run"
    assert load_machine("tune-run/machine.toml").efficiency
    assert cli("plan", "run.toml", "--machine", "tune-run/machine.toml")[0] == 0


def test_mistakes_of_the_command_line(tmp_path: Path, prefix: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_file(tmp_path, prefix, training__device="cpu")
    assert "--space q=1: write it as" in one_sentence(cli("tune", "run.toml", "--space", "q=1"))
    assert "--space pp=2 --space pp=4: these limits contradict" in one_sentence(
        cli("tune", "run.toml", "--nproc", 8, "--space", "pp=2", "--space", "pp=4")
    )
    assert "no layout of 3 devices" in one_sentence(cli("tune", "run.toml", "--nproc", 3, "--space", "pp=3"))
    assert shutil.which("sbatch") or "--slurm needs sbatch" in one_sentence(
        cli("tune", "run.toml", "--slurm", "generic", "--nodes", 1)
    )
