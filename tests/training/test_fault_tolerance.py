"""Test real jobs that hang, crash, run out of time, or do not stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import Cli, exit_code
from patience import PATIENCE, wait_until
from poisoned_runs import same_tensors, tensors_at, train_without
from pool import Pool
from tiny_corpus import run_file
from train_processes import (
    Start,
    checkpoint_steps,
    children_of,
    endless,
    steps_of,
    wait_for_steps,
    with_change,
    workers_of,
)

from fourfold.errors import UserError
from fourfold.exit_codes import HANG, STOPPED
from fourfold.run_file.load import load_run
from fourfold.training.attempts import note_start
from fourfold.training.bad_steps import BadSteps
from fourfold.training.job import Job
from fourfold.training.metrics import read_metrics

REPOSITORY = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=2"]


def worker(parent: subprocess.Popen[str], rank: int) -> int:
    """Return the process of a rank, whether ``fourfold train`` itself or torchrun has started it."""
    launched = "torch.distributed.run" in Path(f"/proc/{parent.pid}/cmdline").read_text()
    return (children_of if launched else workers_of)(parent.pid)[rank]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "runs" / "run" / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [1, 0])
def test_a_rank_that_was_stopped_is_named(tmp_path: Path, prefix: str, start: Start, stopped: int) -> None:
    path = endless(tmp_path, prefix, parallel__x=2, fault_tolerance__timeout=20, fault_tolerance__max_restarts=0)
    process = start(path)
    wait_for_steps(path, 2, process)
    os.kill(worker(process, stopped), signal.SIGSTOP)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == HANG, errors
    assert re.search(rf"hang: rank {stopped} of 2 \(process \d+ on .*\) went silent \d+ s ago at step \d+", errors)
    assert "it is stopped; stacks of all ranks are in" in errors
    (folder,) = (tmp_path / "runs" / "run" / "hangs").iterdir()
    for rank in range(2):
        report = json.loads((folder / f"rank_{rank:05}.json").read_text())
        assert any("training/trainer.py" in line for line in report["stacks"])
    assert (folder / "hang.txt").read_text() in errors


FAIL_IN_STEP_4 = """
def change(module):
    original = module.Job.update

    def update(job, step, grad_norm):
        if step == 3:
            raise ZeroDivisionError("the batch of step 4")
        return original(job, step, grad_norm)

    module.Job.update = update
"""


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["stop", "skip"])
def test_a_step_that_always_fails_is_found(tmp_path: Path, prefix: str, start: Start, pool: Pool, answer: str) -> None:
    """The job either ends with an error that names the step, or skips the step's batch. Then it is bit-identical to a
    job without this batch."""
    changes = {"parallel__x": 2, "checkpoint__interval": 2, "fault_tolerance__max_restarts": 1}
    path = run_file(tmp_path, prefix, fault_tolerance__failing_step=answer, **changes)
    process = start(path, environ=with_change(tmp_path, "fourfold.training.job", FAIL_IN_STEP_4))
    _, errors = process.communicate(timeout=PATIENCE)
    assert errors.count("ZeroDivisionError: the batch of step 4") == 2
    named = "fourfold: step 4 failed 2 times in a row (fault_tolerance.max_restarts = 1)"
    if answer == "stop":
        assert process.returncode == 2 and f"{named}; read what the attempts printed" in errors
        return
    assert process.returncode == 0 and f"{named}; the batch of this step is left out; see" in errors, errors
    records = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert [record["step"] for record in records if record.get("skipped")] == [4]
    (line,) = BadSteps(tmp_path / "runs" / "run").read()
    assert (line["action"], line["samples"], line["skips"]) == ("leave_out", [12, 13, 14, 15], [4])
    (tmp_path / "without").mkdir()
    without = load_run(run_file(tmp_path / "without", prefix, **changes))
    pool.run(2, train_without, without, {4})
    assert same_tensors(tensors_at(load_run(path), 8), tensors_at(without, 8))


@pytest.mark.parametrize(
    ("answer", "message"),
    [("stop", "2 times in a row .*; read what"), ("skip", "3 times .*, although its batch was")],
)
def test_a_step_that_fails_again_ends_the_job(tmp_path: Path, prefix: str, answer: str, message: str) -> None:
    run = load_run(run_file(tmp_path, prefix, fault_tolerance__failing_step=answer, fault_tolerance__max_restarts=1))
    with pytest.raises(UserError, match=f"step 1 failed {message}"):
        for restarts in range(4):
            note_start(tmp_path, restarts, run, 0)
    assert [line["skips"] for line in BadSteps(tmp_path).read()] == [[1]] * (answer == "skip")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rendezvous", "killed"),
    [
        (["--standalone"], [1]),
        (["--standalone"], [0, 1]),
        (["--master-port=29617"], [1]),
        (["--master-port=29619"], [0, 1]),
    ],
    ids=str,
)
def test_torchrun_starts_again(
    tmp_path: Path, prefix: str, start: Start, rendezvous: list[str], killed: list[int]
) -> None:
    path = run_file(tmp_path, prefix, parallel__x=2, training__train_steps=40, checkpoint__interval=2)
    process = start(path, [*TORCHRUN, *rendezvous, "--nproc-per-node=2", "-m", "fourfold"])
    wait_for_steps(path, 3, process)
    for process_id in [worker(process, rank) for rank in killed]:
        os.kill(process_id, signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert len(losses(tmp_path)) == 40
    assert 40 in checkpoint_steps(tmp_path)
    attempts = (tmp_path / "runs" / "run" / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line).get("restarts") for line in attempts] == [0, 1, None]


@pytest.mark.slow
def test_the_second_sigterm_ends_a_job_that_cannot_save(tmp_path: Path, prefix: str, start: Start) -> None:
    path = endless(tmp_path, prefix, parallel__x=2)
    process = start(path)
    wait_for_steps(path, 2, process)
    os.kill(worker(process, 1), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Stopped. There is no checkpoint yet" in errors


@pytest.mark.slow
def test_a_job_that_does_not_save_in_its_period_of_grace_ends(tmp_path: Path, prefix: str, start: Start) -> None:
    path = endless(tmp_path, prefix, parallel__x=2, fault_tolerance__grace_period=2)
    process = start(path)
    wait_for_steps(path, 2, process)
    os.kill(worker(process, 1), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, errors


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"parallel__x": 2}], ids=["one process", "two local workers"])
def test_a_signal_during_the_start_stops_before_the_first_step(
    tmp_path: Path, prefix: str, start: Start, parallel: dict[str, object]
) -> None:
    path = endless(tmp_path, prefix, **parallel)
    process = start(path)
    wait_until(lambda: imports_torch(process.pid) or any(map(imports_torch, children_of(process.pid))), process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == STOPPED, errors
    assert "Stopped. There is no checkpoint yet: no step is lost" in output


def imports_torch(process_id: int) -> bool:
    return "libtorch" in Path(f"/proc/{process_id}/maps").read_text()


@pytest.mark.slow
def test_a_job_without_its_watchdog_continues(tmp_path: Path, prefix: str, start: Start) -> None:
    path = endless(tmp_path, prefix)
    process = start(path)
    wait_for_steps(path, 2, process)
    for child in children_of(process.pid):
        os.kill(child, signal.SIGKILL)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == STOPPED, errors
    assert len(checkpoint_steps(tmp_path)) == 1


def test_the_limit_of_time_saves_and_stops(
    tmp_path: Path, prefix: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock passes the limit when two steps have been recorded."""
    path = endless(tmp_path, prefix, fault_tolerance__max_wall_time=1)
    clock = SimpleNamespace(monotonic=lambda: 60.0 if steps_of(path) >= 2 else 0.0)
    monkeypatch.setattr("fourfold.launch.stop_signals.time", clock)
    code, output, _ = cli("train", path)
    assert code == STOPPED
    (step,) = checkpoint_steps(tmp_path)
    assert step == 3
    assert "a signal or the time limit, after saving" in output
    assert f"step_{step}: no step is lost. The same command continues from it." in output


def test_the_limit_of_time_before_the_first_step(tmp_path: Path, prefix: str, cli: Cli) -> None:
    code, output, _ = cli("train", endless(tmp_path, prefix, fault_tolerance__max_wall_time=1e-9))
    assert code == STOPPED and not checkpoint_steps(tmp_path)
    assert "a signal or the time limit, before the first checkpoint" in output and "Done" not in output


@pytest.mark.parametrize("code", [0, 3, "the end", None])
def test_a_step_that_leaves_the_program_is_a_crash(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, code: object
) -> None:
    """Every exit code counts as a crash, because a library that does not know about the job may have called exit."""

    def update(*_: object) -> None:
        sys.exit(code)  # type: ignore[arg-type]

    monkeypatch.setattr(Job, "update", update)
    with pytest.raises(RuntimeError, match=re.escape(f"sys.exit({code!r}) before the job had finished")):
        exit_code("train", run_file(tmp_path, prefix))


@pytest.mark.slow
def test_ranks_end_with_their_torchrun(tmp_path: Path, prefix: str, start: Start) -> None:
    path = endless(tmp_path, prefix, parallel__x=2)
    process = start(path, [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "fourfold"])
    wait_for_steps(path, 2, process)
    ranks = children_of(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.communicate(
        timeout=PATIENCE
    )  # returns when nobody holds the output open, so all ranks and watchdogs have ended
    assert not any(Path(f"/proc/{rank}/exe").exists() for rank in ranks)


@pytest.mark.slow
def test_a_new_node_takes_the_place_of_one_that_was_lost(tmp_path: Path, prefix: str, start: Start) -> None:
    """Two torchrun agents, started by the template for clusters, act as two nodes."""
    path = run_file(tmp_path, prefix, parallel__x=2, training__train_steps=200, checkpoint__interval=5)
    script = REPOSITORY / "examples" / "clusters" / "torchrun.sh"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PORT": str(port)}
    words = ["bash", str(script), "127.0.0.1", "2", "1"]
    agents = [start(path, words, environ)]
    wait_until(lambda: listens(port), agents[0])  # all agents meet at this port of the first agent
    agents.append(start(path, words, environ))
    wait_for_steps(path, 7, agents[0])  # wait until the first checkpoint exists
    second = children_of(agents[1].pid)
    agents[1].kill()  # the agent's rank ends together with the agent
    agents[1].communicate(timeout=PATIENCE)
    assert not any(Path(f"/proc/{rank}/exe").exists() for rank in second)
    agents[1] = start(path, words, environ)
    for agent in agents:
        _, errors = agent.communicate(timeout=PATIENCE)
        assert agent.returncode == 0, errors
    assert len(losses(tmp_path)) == 200
    attempts = [json.loads(line) for line in (tmp_path / "runs" / "run" / "attempts.jsonl").read_text().splitlines()]
    assert [line.get("first_step", 0) > 0 for line in attempts] == [False, True, False]
    assert attempts[-1] == {"ended": True}


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
