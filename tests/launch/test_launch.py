"""One job on all its processes: groups, local workers, how they fail, and how they end."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import launch_bodies
import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE, wait_until
from python_start import run_at_start

from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.launch.job_processes import choose_device, run_on_grid
from fourfold.launch.local_workers import WorkerFailed, run_workers


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the environment of rank 0 of 1."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)


def start_parent(body: str, folder: Path, saves: bool = False) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a process that runs the body in two workers. As soon as the workers exist, return this parent process and
    the workers' process ids.

    The parent itself may not know the ids yet. A signal that comes so early ends the parent, unless ``saves`` is true.
    """
    code = (
        "import launch_bodies; from fourfold.launch.local_workers import run_workers;"
        f"print(run_workers(launch_bodies.{body}, [{str(folder)!r}], 2, {saves}))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [folder / str(rank) for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files), parent)
    return parent, [int(file.read_text()) for file in files]


def wait_for_end_of(process_ids: list[int]) -> None:
    """Wait until the processes have ended. Their parent may no longer exist to reap them."""
    wait_until(lambda: not any(map(is_running, process_ids)))


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_local_workers_share_a_group(capfd: pytest.CaptureFixture[str]) -> None:
    result = run_on_grid("launch_bodies:sum_of_ranks", [0.5], 2, "cpu")
    cores = len(os.sched_getaffinity(0))
    place = Place(0, 0, 2, 2, "local")
    assert result == {"total": 0.5, "size": 2, "threads": max(1, cores // 2), "place": place}
    output, errors = capfd.readouterr()
    assert output.splitlines() == ["output of rank 0"]
    assert sorted(errors.splitlines()) == [f"error of rank {rank}" for rank in range(2)]


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_workers_are_forked_from_one_that_has_imported_the_modules() -> None:
    imported_by, starter = run_workers(launch_bodies.who_imported, [], 2, modules=["launch_bodies", "no_such_module"])
    assert imported_by == starter != os.getpid()


def test_workers_end_with_their_starter(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"^worker \d of 2 was ended by SIGKILL"):
        run_workers(launch_bodies.end_the_starter, [str(tmp_path)], 2)
    wait_for_end_of([int(file.read_text()) for file in tmp_path.glob("?")])


FAILING_FORK = """
import os
fork, calls = os.fork, []

def fail_the_second_time():
    calls.append(None)
    if len(calls) == 2:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = fail_the_second_time
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are not forked")
def test_a_worker_that_cannot_be_started_ends_the_job(tmp_path: Path) -> None:
    code = "import launch_bodies; from fourfold.launch.local_workers import run_workers;"
    code += f"run_workers(launch_bodies.sleep, [{str(tmp_path)!r}], 3)"
    environment = os.environ | run_at_start(tmp_path, FAILING_FORK, Path(__file__).parent)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert "cannot start process 2 of 3: Resource temporarily unavailable" in done.stderr
    assert "WorkerFailed: worker 0 of 3 exited with code 1" in done.stderr
    wait_for_end_of([int(file.read_text()) for file in tmp_path.glob("?")])


def test_a_process_knows_its_start_time(capfd: pytest.CaptureFixture[str]) -> None:
    before = time.time()
    code = "import time; time.sleep(0.3); from fourfold.processes import time_of_start; print(time_of_start())"
    started = float(subprocess.check_output([sys.executable, "-c", code]))
    assert before - 0.05 < started < time.time() - 0.3
    assert run_on_grid("launch_bodies:sum_of_ranks", [0.5], 1, "cpu", started=started)["place"].started == started
    capfd.readouterr()


def test_one_process_needs_no_worker() -> None:
    result = run_on_grid("launch_bodies:sum_of_ranks", [0.5], 1, "cpu")
    assert (result["size"], result["place"]) == (1, Place(0, 0, 1, 1, "local"))
    assert not dist.is_initialized()
    with pytest.raises(UserError, match=r"^no$"):
        run_on_grid("launch_bodies:refuse", [], 1, "cpu")
    assert not dist.is_initialized()


@pytest.mark.usefixtures("torchrun")
def test_launched_process_joins_its_group() -> None:
    result = run_on_grid("launch_bodies:sum_of_ranks", [0.5], 1, "cpu")
    assert (result["size"], result["place"]) == (1, Place(0, 0, 1, 1, "torchrun"))


@pytest.mark.usefixtures("torchrun")
def test_a_launcher_with_another_world_size_is_refused() -> None:
    with pytest.raises(UserError, match=r"torchrun started 1 processes, but the run file's \[parallel\] needs 4"):
        run_on_grid("launch_bodies:sum_of_ranks", [0.5], 4, "cpu")


@pytest.mark.usefixtures("torchrun")
def test_a_port_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(UserError, match=r"rank 0 of 1 could not meet the other ranks at tcp://127"):
            run_on_grid("launch_bodies:sum_of_ranks", [0.5], 1, "cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("torchrun")
def test_launched_process_is_not_aborted_after_an_error() -> None:
    code = (
        "import sys; from fourfold.errors import UserError; from fourfold.launch.job_processes import run_on_grid\n"
        "try: run_on_grid('launch_bodies:refuse_on_rank_1', [], 2, 'cpu')\n"
        "except UserError as error: sys.exit(2)"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "WORLD_SIZE": "2", "RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    errors = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 2], errors
    assert "Connection" in errors[0]  # rank 0 lost its connection to rank 1
    assert errors[1] == ""


def test_a_workers_user_error_is_raised_by_the_parent(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"^this corpus has no documents$"):
        run_on_grid("launch_bodies:refuse_on_rank_1", [], 2, "cpu")
    assert capfd.readouterr() == ("", "")


def test_a_workers_crash_ends_all_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerFailed, match=r"^worker 2 of 4 failed:\nTraceback") as failure:
        run_workers(launch_bodies.crash_on_rank_2, [str(tmp_path)], 4)
    assert str(failure.value).count("ZeroDivisionError: rank 2 divides by zero") == 1
    assert capfd.readouterr() == ("", "")
    wait_for_end_of([int(file.read_text()) for file in tmp_path.glob("?")])


def test_the_death_of_a_worker_is_reported() -> None:
    with pytest.raises(WorkerFailed, match=r"^worker 1 of 2 was ended by SIGKILL, which the kernel sends"):
        run_workers(launch_bodies.be_killed, [], 2)
    with pytest.raises(WorkerFailed, match=r"^worker 0 of 1 exited with code 5 before it had finished$"):
        run_workers(launch_bodies.leave, [], 1)


def test_a_killed_parent_leaves_no_orphan(tmp_path: Path) -> None:
    parent, workers = start_parent("sleep", tmp_path)
    parent.kill()
    wait_for_end_of(workers)
    parent.communicate()


def test_sigterm_reaches_the_workers_so_that_they_can_save(tmp_path: Path) -> None:
    parent, workers = start_parent("save_at_sigterm", tmp_path, saves=True)
    parent.send_signal(signal.SIGTERM)
    assert parent.communicate(timeout=PATIENCE) == ("saved\n", "")
    assert parent.returncode == 0
    wait_for_end_of(workers)


def test_sigterm_that_no_worker_handles_ends_the_job(tmp_path: Path) -> None:
    parent, workers = start_parent("sleep", tmp_path)
    parent.send_signal(signal.SIGTERM)
    assert parent.communicate(timeout=PATIENCE) == ("", "")
    assert parent.returncode == 128 + signal.SIGTERM
    wait_for_end_of(workers)


def test_an_interrupt_ends_the_job_and_workers_print_nothing(tmp_path: Path) -> None:
    parent, workers = start_parent("sleep", tmp_path)
    # Like a terminal, also signal the workers.
    for process_id in (*workers, parent.pid):
        os.kill(process_id, signal.SIGINT)
    _, errors = parent.communicate(timeout=PATIENCE)
    assert errors.count("Traceback") == 1, errors
    assert errors.endswith("KeyboardInterrupt\n")
    wait_for_end_of(workers)


def test_an_interrupt_while_workers_start_ends_the_job() -> None:
    with pytest.raises(KeyboardInterrupt):
        run_workers(launch_bodies.have_started, [launch_bodies.InterruptedStart()], 2)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_sigterm_while_workers_start_reaches_them_later() -> None:
    task = (launch_bodies.saved_at_sigterm, [launch_bodies.StoppedStart()])
    assert run_workers(*task, 2, heeds_stop_signals=True) == "saved"


def test_parent_of_workers_does_not_import_torch() -> None:
    code = "import sys, fourfold.launch.job_processes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device(Place(0, 0, 1, 1, "local"), "auto") == torch.device("cpu")
    with pytest.raises(UserError, match=r"'cuda' needs a GPU"):
        choose_device(Place(0, 0, 1, 1, "local"), "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device(Place(6, 6, 8, 8, "local"), "cpu") == torch.device("cpu")
    assert choose_device(Place(3, 3, 4, 4, "local"), "auto") == torch.device("cuda", 3)
    for launcher in ("local", "torchrun", "slurm"):
        with pytest.raises(
            UserError, match=r"8 processes on this machine need a GPU each, but torch sees 4; start 4 per machine"
        ):
            choose_device(Place(6, 6, 16, 8, launcher), "auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="torch sees 1"):
        choose_device(Place(6, 6, 8, 8, "torchrun"), "auto")
    assert choose_device(Place(6, 6, 8, 8, "slurm"), "auto") == torch.device("cuda", 0)


def test_a_job_inside_a_group_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="already in a process group"):
            run_on_grid("launch_bodies:sum_of_ranks", [1.0], 1)
    finally:
        dist.destroy_process_group()
