"""After Ctrl-C, a closed terminal, or a launcher's signal, real processes save. After a second signal, they stop
without saving."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from command_line import Cli
from patience import PATIENCE, wait_until
from python_start import run_at_start
from tiny_corpus import run_file
from train_processes import (
    FOURFOLD,
    ONE_THREAD,
    Start,
    checkpoint_steps,
    children_of,
    endless,
    heed_hangup,
    wait_for_steps,
)

from fourfold.launch import stop_signals
from fourfold.launch.stop_signals import StopRequest, stop_request
from fourfold.run_file.load import load_run
from fourfold.training.run_folder import where_it_continues


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("parallel", [{}, {"parallel__x": 2}], ids=["one process", "two local workers"])
def test_the_first_interrupt_saves(
    tmp_path: Path, prefix: str, start: Start, cli: Cli, parallel: dict[str, object]
) -> None:
    path = endless(tmp_path, prefix, **parallel)
    process = start(path)
    wait_for_steps(path, 2, process)
    # Signal every process of the group, as a terminal does.
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3, errors
    assert errors.count("saving a checkpoint after this step; press Ctrl-C again to stop without saving") == 1
    assert "Traceback" not in errors
    (step,) = checkpoint_steps(tmp_path)
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / f"step_{step}"
    assert f"The newest checkpoint is {checkpoint}: no step is lost. The same command continues from it.\n" in output
    if not parallel:
        assert cli("train", path, "--set", f"training.train_steps={step + 1}")[0] == 0
        assert step + 1 in checkpoint_steps(tmp_path)


STAY_IN_STEP_4 = """
import os, pathlib, time
from fourfold.training.job import Job

original = Job.update

def update(job, step, grad_norm):
    if step == 3:
        pathlib.Path(os.environ["IN_STEP_4"]).touch()
        time.sleep(600)
    return original(job, step, grad_norm)

Job.update = update
"""


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"parallel__x": 2}], ids=["one process", "two local workers"])
def test_the_second_interrupt_stops(tmp_path: Path, prefix: str, start: Start, parallel: dict[str, object]) -> None:
    """The second interrupt comes in the middle of a step. The step is not finished."""
    path = endless(tmp_path, prefix, checkpoint__interval=2, **parallel)
    in_step_4 = tmp_path / "in step 4"
    process = start(path, environ=run_at_start(tmp_path, STAY_IN_STEP_4) | {"IN_STEP_4": str(in_step_4)})
    wait_until(in_step_4.exists, process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    assert any("press Ctrl-C again" in line for line in process.stderr)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert re.search(r"Stopped\. The newest checkpoint is .*step_2: 1 step is lost\. The same command contin", errors)
    assert checkpoint_steps(tmp_path) == [2]


@pytest.mark.slow
def test_an_interrupt_before_the_first_step_stops(tmp_path: Path, prefix: str, start: Start) -> None:
    path = endless(tmp_path, prefix, parallel__x=2)
    process = start(path)
    # At this moment, the workers still import torch.
    wait_until(lambda: len(children_of(process.pid)) >= 2, process)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3, errors
    assert "Stopped. There is no checkpoint yet: no step is lost, and the same command starts again." in output
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_closed_terminal_saves(tmp_path: Path, prefix: str) -> None:
    """The kernel sends SIGHUP, and from then on nothing can be printed."""
    path = endless(tmp_path, prefix)
    ours, theirs = os.openpty()

    def take_terminal() -> None:
        heed_hangup()
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*FOURFOLD, "train", str(path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        text=True,
        env=ONE_THREAD,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    wait_for_steps(path, 2, process)
    os.close(ours)
    assert process.wait(timeout=PATIENCE) == 3
    assert len(checkpoint_steps(tmp_path)) == 1
    assert (tmp_path / "runs" / "run" / "report.html").is_file()


@pytest.mark.slow
def test_an_interrupt_of_torchrun_saves(tmp_path: Path, prefix: str, start: Start) -> None:
    path = endless(tmp_path, prefix, parallel__x=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fourfold"]
    process = start(path, torchrun)
    wait_for_steps(path, 2, process)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE)
    assert errors.count("saving a checkpoint after this step") == 1, errors
    assert len(checkpoint_steps(tmp_path)) == 1
    assert output.count("no step is lost") == 1


def test_a_launcher_may_deliver_an_interrupt_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.2, 12.0])
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: next(clock))
    request = StopRequest(announce=False, launched=True)
    request.receive(signal.SIGINT, None)
    request.receive(signal.SIGINT, None)
    assert request.is_set
    with pytest.raises(KeyboardInterrupt):
        request.receive(signal.SIGINT, None)


def test_an_interrupt_after_another_stop_signal_stops() -> None:
    request = StopRequest(announce=False, launched=False)
    # A scheduler may send the signal twice.
    for _ in range(2):
        request.receive(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        request.receive(signal.SIGINT, None)


def test_signals_that_are_ignored_stay_so() -> None:
    """For example, nohup ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_request() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request.is_set
            os.kill(os.getpid(), signal.SIGUSR1)
            assert request.is_set
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_that_does_not_resume_by_itself_says_how(tmp_path: Path, prefix: str) -> None:
    """The checkpoint of step 90 is ignored: the record ends at step 5, so an earlier attempt must have saved it."""
    run = load_run(run_file(tmp_path, prefix, checkpoint__resume="never"))
    folder = tmp_path / "runs" / "run"
    for step in (2, 90):
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (folder / "checkpoints" / f"step_{step}" / "state.json").touch()
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 6)))
    assert where_it_continues(run) == (
        f"The newest checkpoint is {folder}/checkpoints/step_2: 3 steps are lost. The same command with --set "
        f"checkpoint.resume={folder}/checkpoints/step_2 continues from it."
    )
