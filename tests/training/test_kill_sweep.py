"""Kill runs at seeded moments, and before every file operation of a save. The resumed runs are bit-identical to a run
that was never killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli
from patience import PATIENCE, wait_until
from poisoned_runs import same_tensors, tensors_at
from tiny_corpus import run_file
from train_processes import FOURFOLD, ONE_THREAD, Start, steps_of, wait_for_steps, with_change, workers_of

from fourfold.run_file.load import load_run
from fourfold.training.metrics import read_metrics

SETTINGS: dict[str, dict[str, object]] = {
    "x 2": {"parallel__x": 2},
    "z 2": {"parallel__z": 2},
    "x 2, saved while training": {"parallel__x": 2, "checkpoint__async_mode": "async"},
}
VICTIMS = ["rank 0", "rank 1", "parent", "group"]
Whole = Callable[[str, int], Path]


def killable(folder: Path, prefix: str, steps: int, **changes: object) -> Path:
    """Write a run file with a checkpoint every second step. Two checkpoints are kept."""
    folder.mkdir(exist_ok=True)
    saves: dict[str, object] = {"checkpoint__interval": 2, "checkpoint__keep_latest_k": 2}
    return run_file(folder, prefix, training__train_steps=steps, **saves, **changes)


@pytest.fixture(scope="module")
def whole(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return a function that trains a run without killing it, and returns the run's folder. A run with the same
    arguments is trained only once."""
    folders: dict[tuple[str, int], Path] = {}

    def run(setting: str, steps: int) -> Path:
        if (setting, steps) not in folders:
            folder = folders[setting, steps] = tmp_path_factory.mktemp("whole")
            path = killable(folder, prefix, steps, **SETTINGS[setting])
            subprocess.run([*FOURFOLD, "train", str(path)], env=ONE_THREAD, check=True, timeout=PATIENCE)
        return folders[setting, steps]

    return run


def assert_the_same(folder: Path, other: Path, steps: int, cli: Cli) -> None:
    """Check that the figures of every step, the last tensors, and the names of all checkpoints are equal, and that
    every checkpoint is undamaged."""
    runs = [load_run(each / "run.toml") for each in (folder, other)]
    records = [read_metrics(Path(run.output_dir, run.name, "metrics.jsonl")) for run in runs]
    figures = [[(r["step"], r["loss"], r["grad_norm"]) for r in record] for record in records]
    assert figures[0] == figures[1]
    assert same_tensors(*(tensors_at(run, steps) for run in runs))
    saved, others = (Path(run.output_dir, run.name, "checkpoints") for run in runs)
    assert sorted(os.listdir(saved)) == sorted(os.listdir(others)) == [f"step_{steps - 2}", f"step_{steps}"]
    for checkpoint in saved.iterdir():
        assert cli("checkpoint", "verify", checkpoint)[0] == 0


def ended(process: subprocess.Popen[str]) -> str:
    """Wait until a job and every process of its session have ended. Return its standard error."""
    _, errors = process.communicate(timeout=PATIENCE)
    wait_until(lambda: not _processes_of(process.pid))
    return errors


def _processes_of(session: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):  # the process has ended
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(folder.name))
    return found


def kill(process: subprocess.Popen[str], victim: str) -> None:
    if victim == "group":
        os.killpg(process.pid, signal.SIGKILL)
    elif victim == "parent":
        process.kill()
    else:
        os.kill(workers_of(process.pid)[int(victim[-1])], signal.SIGKILL)


def test_a_kill_of_one_process_changes_no_bit(tmp_path: Path, prefix: str, start: Start, cli: Cli) -> None:
    """The test is a short version of the sweep. Only the killed attempt runs in its own process."""
    folders = tmp_path / "killed", tmp_path / "whole"
    paths = [killable(folder, prefix, 16) for folder in folders]
    process = start(paths[0])
    wait_for_steps(paths[0], 2, process)
    kill(process, "group")
    ended(process)
    assert process.returncode == -signal.SIGKILL
    for path in paths:
        assert cli("train", path)[0] == 0
    assert_the_same(*folders, 16, cli)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(36))
def test_a_kill_at_any_moment_changes_no_bit(
    tmp_path: Path, prefix: str, whole: Whole, start: Start, cli: Cli, seed: int
) -> None:
    """Kill each victim three times in each setting. Every fifth kill comes during the start. All other kills come
    between steps or during a save."""
    steps, chance = 40, random.Random(seed)
    setting, victim = list(SETTINGS)[seed % 3], VICTIMS[seed % 4]
    path = killable(tmp_path, prefix, steps, **SETTINGS[setting])
    process = start(path)
    early = seed % 5 == 4
    if early:
        wait_until(lambda: len(workers_of(process.pid)) == 2, process)
        moment = time.monotonic() + chance.uniform(0, 3)
        # Also stop waiting if training begins earlier.
        wait_until(lambda: time.monotonic() >= moment or steps_of(path) > 0, process)
    else:
        wait_for_steps(path, chance.randint(1, steps - 4), process)
        time.sleep(chance.uniform(0, 0.05))
    kill(process, victim)
    errors = ended(process)
    assert process.returncode != 0 or (victim.startswith("rank") and "was ended by SIGKILL" in errors), errors
    if process.returncode != 0:
        assert early or not victim.startswith("rank"), errors  # a job restarts its own workers once they have trained
        process = start(path)
        errors = ended(process)
    assert process.returncode == 0, errors
    assert_the_same(tmp_path, whole(setting, steps), steps, cli)


SAVED = 6
"""The step whose save is interrupted. This save also removes the checkpoint of step 2."""
KILL_BEFORE = """
import multiprocessing, os, signal

def change(module):
    folder, chosen = os.environ["KILL_FOLDER"], int(os.environ["KILL_BEFORE"])
    count, saving = 0, False

    def before(event, arguments):
        nonlocal count, saving
        # Workers are forked from the process that has imported this.
        if event not in EVENTS or multiprocessing.current_process().name != f"fourfold-{os.environ['KILL_RANK']}":
            return
        what = f"{event} {arguments[0] if arguments else ''}"
        if ".partial" in what:
            saving = ".step_SAVED.partial" in what
        if not saving:
            return
        count += 1
        if chosen == 0:
            os.write(log, f"{what}\\n".encode())
        elif count == chosen and not os.path.exists(f"{folder}/killed"):
            os.mkdir(f"{folder}/killed")
            os.kill(os.getpid(), signal.SIGKILL)

    EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "write", "fsync")
    log = os.open(f"{folder}/operations", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    contents, fsync = module._contents, os.fsync
    module._contents = lambda *of: ((before("write", ()), content)[1] for content in contents(*of))
    os.fsync = lambda file: (before("fsync", ()), fsync(file))[1]
    sys.addaudithook(before)
""".replace("SAVED", str(SAVED))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "every"),
    [(0, False), *(pytest.param(rank, True, id=f"every one of rank {rank}") for rank in (0, 1))],
)
def test_a_kill_before_a_file_operation_changes_no_bit(
    tmp_path: Path, prefix: str, whole: Whole, start: Start, cli: Cli, rank: int, every: bool
) -> None:
    """The save also removes an older checkpoint. Its file operations are: create a directory, open, write, fsync,
    rename, and remove."""
    environ = with_change(tmp_path, "fourfold.models.tensor_files", KILL_BEFORE) | {"KILL_RANK": str(rank)}

    def run(folder: Path, operation: int) -> str:
        path = killable(folder, prefix, 8, **SETTINGS["x 2"])
        process = start(path, environ=environ | {"KILL_FOLDER": str(folder), "KILL_BEFORE": str(operation)})
        errors = ended(process)
        assert process.returncode == 0, errors
        return errors

    run(tmp_path / "0", 0)
    operations = (tmp_path / "0" / "operations").read_text().splitlines()
    assert len(operations) > 3
    for number in range(1, len(operations) + 1) if every else [len(operations) // 2]:
        folder = tmp_path / str(number)
        errors = run(folder, number)
        assert f"worker {rank} of 2 was ended by SIGKILL" in errors, operations[number - 1]
        assert "restarting. The newest checkpoint is " in errors
        assert_the_same(folder, whole("x 2", 8), 8, cli)
