"""Batch scripts: each site's conventions, clean shell code, and how a job ends, with stand-ins for SLURM."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from command_line import Cli
from patience import PATIENCE, wait_until
from tiny_corpus import run_file

from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.launch.job_scripts.slurm_script import SlurmJob, render_slurm_script, tasks_per_node, wall_seconds
from fourfold.launch.job_scripts.slurm_site import load_site, parse_site, site_names
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.checkpoint_interval import best_interval
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.plan import predict
from fourfold.run_file.load import load_run

SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

SRUN = """#!{python}
import os, signal, subprocess, sys

options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + len(options):]
assert sys.argv[1:] == options + command
ranks = int(dict(option[2:].partition("=")[::2] for option in options)["ntasks-per-node"])
ours = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0"}}
processes = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: [process.send_signal(number) for process in processes])
for rank in range(ranks):
    place = {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}}
    processes.append(subprocess.Popen(command, env=os.environ | ours | place))
open("srun.pid", "w").write(str(os.getpid()))
codes = [process.wait() for process in processes]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
"""A stand-in for srun: it starts the tasks of one node, relays signals to them, and returns the highest exit code."""


def make_run(folder: Path, **parallel: int) -> RunConfig:
    changes = {f"parallel__{axis}": size for axis, size in parallel.items()}
    return load_run(run_file(folder, "/nowhere/corpus", training__global_batch_size=64, **changes))


def make_script(folder: Path, site: str = "generic", **job: object) -> str:
    run = make_run(folder, z=2, dp=4) if site != "generic" else make_run(folder, z=2)
    nodes = 1 if site == "generic" else 8 // (load_site(site).gpus_per_node or 1)
    return render_slurm_script("run.toml", run, load_site(site), SlurmJob(nodes, **job))


def stand_ins(folder: Path, **programs: str) -> dict[str, str]:
    """Return an environment whose PATH begins with these programs and a `scontrol` that records its calls."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in {"scontrol": '#!/bin/bash\necho "$@" >> scontrol.calls\n', **programs}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "SLURM_JOB_NAME": "run", "SLURM_JOB_ID": "7"}


def start(folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "job.sh"], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def calls_of_scontrol(folder: Path) -> list[str]:
    calls = folder / "scontrol.calls"
    return calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("site", site_names())
def test_a_script_is_clean_shell(tmp_path: Path, site: str) -> None:
    given = {"time": "06:00:00", "account": "abc", "setup": "my setup.sh", "wrapper": "singularity run a.sif"}
    text = make_script(tmp_path, site, **given, overrides=["name=a b", "data.train=[{path = 'x'}]"])
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "@" not in text.replace("USR1@300", "")
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([SHELLCHECK, "-"], input=text, text=True, capture_output=True)
    assert done.stdout == "" and done.returncode == 0


@pytest.mark.parametrize(
    ("site", "lines"),
    [
        ("frontier", ["#SBATCH --nodes=1", "#SBATCH --network=disable_rdzv_get", "module load rccl-net-plugin",
                      'export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR:-kdreg2}"']),
        ("lumi", ["#SBATCH --partition=standard-g", "#SBATCH --gpus-per-node=8", "#SBATCH --cpus-per-task=7"]),
        ("perlmutter", ["#SBATCH --nodes=2", "#SBATCH --constraint=gpu", "#SBATCH --cpus-per-task=32"]),
        ("alps", ["#SBATCH --ntasks-per-node=4", 'export NCCL_NET="${NCCL_NET:-AWS Libfabric}"', "ulimit -c 0"]),
        ("generic", ["#SBATCH --gpus-per-node=2", "#SBATCH --exclusive", "#SBATCH --signal=USR1@300",
                     "#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --job-name=run"]),
    ],
)  # fmt: skip
def test_conventions_of_a_site(tmp_path: Path, site: str, lines: list[str]) -> None:
    script = make_script(tmp_path, site)
    assert set(lines) <= set(script.splitlines())
    assert ("NCCL_NET" in script.replace("NCCL_NET_", "")) == (site == "alps"), "frontier's is for several nodes"


def test_several_nodes_of_frontier_need_the_plugin(tmp_path: Path) -> None:
    script = render_slurm_script("run.toml", make_run(tmp_path, z=4, dp=4), load_site("frontier"), SlurmJob(2))
    assert 'export NCCL_NET="${NCCL_NET:-OFI}"' in script
    assert "--ntasks-per-node=8 --cpus-per-task=7 --gpus-per-task=1 --gpu-bind=closest" in script


def test_the_user_replaces_the_sites_options(tmp_path: Path) -> None:
    script = make_script(
        tmp_path, "lumi", partition="dev-g", sbatch=["qos=debug", "--requeue=x"], srun=["cpu-bind=none", "label"]
    )
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --partition=dev-g" in directives
    assert not any("standard-g" in line for line in directives)
    assert "#SBATCH --qos=debug" in directives
    assert "mask_cpu" not in script
    assert "--cpu-bind=none" in script and " --label " in script


def test_a_users_own_site_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('gpus_per_node = 2\n[sbatch]\nexclusive = true\n[environment]\nA = "$USER"\n')
    site = load_site(str(tmp_path / "mine.toml"))
    assert (site.name, site.gpus_per_node, site.sbatch) == ("mine", 2, {"exclusive": ""})
    assert 'export A="${A:-$USER}"' in render_slurm_script("r.toml", make_run(tmp_path, z=2), site, SlurmJob(1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus_per_nodes = 2", "x.toml: unknown key 'gpus_per_nodes'; choose from name, gpus_per_node,"),
        ("gpus_per_node = true", "x.toml: gpus_per_node = true: must be an integer"),
        ("gpus_per_node = 0", "gpus_per_node = 0: must be an integer ≥ 1"),
        ("sbatch = 2", "sbatch = 2: must be a table$"),
        ("[srun]\n'--label' = true", "srun = '--label': it is not .*; write it without leading dashes$"),
        ("commands = 'a'", "commands = 'a': must be a list"),
        ('commands = ["a\\nb"]', "x.toml: commands.0 = .* must be text of one line"),
        ('[environment]\nA = "a\\nb"', "environment = 'a\\\\nb': it must be text of one line"),
        ("name = ", "not valid TOML"),
    ],
)
def test_invalid_site_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_site(text, "x.toml")


@pytest.mark.parametrize(
    ("site", "nodes", "parallel", "message"),
    [
        ("frontier", 4, {"z": 8, "x": 8}, "1·1·1·8·1·8 needs 64 GPUs, but --nodes 4 of frontier has 32 (8 per node); "
                                          "use --nodes 8, or change [parallel]"),
        ("alps", 1, {"z": 2, "dp": 3}, "has 4 (4 per node); change [parallel] to whole nodes"),
        ("generic", 3, {"z": 4}, "needs 4 GPUs, but they cannot be divided over --nodes 3"),
    ],
)  # fmt: skip
def test_nodes_that_do_not_fit_the_grid_are_refused(
    tmp_path: Path, site: str, nodes: int, parallel: dict[str, int], message: str
) -> None:
    path = run_file(
        tmp_path,
        "/nowhere/corpus",
        training__global_batch_size=24,
        training__micro_batch_size=1,
        **{f"parallel__{axis}": size for axis, size in parallel.items() if axis != "x"},
    )
    run = load_run(path)
    run.parallel.x = parallel.get("x", 1)
    with pytest.raises(UserError) as refused:
        tasks_per_node(run, load_site(site), nodes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--site", "fronteir"), "--site fronteir is unknown; did you mean 'frontier'?"),
        (("--site", "/nowhere/mine.toml"), "--site /nowhere/mine.toml cannot be read"),
        (("--site", "generic", "--account", "a b"), "--account=a b cannot be in an #SBATCH line"),
        (("--site", "generic", "--sbatch=-q debug"), "--sbatch -q debug: write an option's long name"),
        (("--site", "generic", "--wrapper", "a\nb"), "--wrapper must be text of one line, not 'a\\nb'"),
    ],
)
def test_refusals(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    path = run_file(tmp_path, "/nowhere/corpus")
    code, output, errors = cli("launch", "slurm", path, "--nodes", 1, *arguments, "--output", tmp_path / "job.sh")
    assert (code, output) == (2, "")
    assert message in errors and errors.count("\n") == 1
    assert not (tmp_path / "job.sh").exists()


def test_a_job_without_checkpoints_causes_a_warning(cli: Cli, tmp_path: Path) -> None:
    words = ("launch", "slurm", run_file(tmp_path, "/nowhere/corpus"), "--site", "generic", "--nodes", 1)
    code, script, errors = cli(*words, "--set", "checkpoint.interval=0")
    assert code == 0 and script and "warning: checkpoint.interval = 0" in errors and errors.count("\n") == 1
    advice = errors.split("for example ")[1].split()
    assert cli(*words, *advice)[::2] == (0, "")


def script_for_h100s(cli: Cli, folder: Path, *options: object) -> tuple[str, list[str]]:
    """Return the script for 8 GPUs of a DGX H100, and the notes about it."""
    changes = {"training__global_batch_size": 64, "training__device": "cuda", "parallel__dp": 8}
    path = run_file(folder, "/nowhere/corpus", **changes)
    words = ("launch", "slurm", path, "--site", "generic", "--nodes", 1, "--set", "checkpoint.interval=0")
    code, script, errors = cli(*words, "--machine", "dgx-h100", *options)
    assert code == 0, errors
    return script, errors.splitlines()


def test_a_job_saves_at_the_planners_interval(cli: Cli, tmp_path: Path) -> None:
    script, (note,) = script_for_h100s(cli, tmp_path)
    run = make_run(tmp_path, dp=8)
    machine = load_machine("dgx-h100")
    best = best_interval(run.model, predict(workload_of(run), machine, constants_for(machine)))
    assert f"--set checkpoint.interval={best}\n" in script
    assert f"every {best:,} steps" in note and "on dgx-h100" in note


def test_a_wall_time_below_the_interval_causes_a_warning(cli: Cli, tmp_path: Path) -> None:
    _, notes = script_for_h100s(cli, tmp_path, "--time", "0:30")
    assert "warning: --time 0:30 is shorter than the interval of" in notes[-1]
    script, notes = script_for_h100s(cli, tmp_path, "--set", "checkpoint.interval=1", "--time", "0:30")
    assert notes == [] and script.count("checkpoint.interval") == 2  # as the user gave it, and nothing else


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("10", 600), ("10:05", 605), ("01:00:01", 3601), ("1-01", 90_000), ("1-00:30", 88_200), ("1-02:03:04", 93_784),
     ("UNLIMITED", None)],
)  # fmt: skip
def test_seconds_of_a_wall_time(time: str, seconds: int | None) -> None:
    assert wall_seconds(time) == seconds


def test_every_sites_machine_exists() -> None:
    machines = [load_site(name).machine for name in site_names()]
    assert [load_machine(name).name for name in machines if name is not None] == [
        "alps",
        "frontier",
        "frontier",
        "perlmutter",
    ]


@pytest.mark.parametrize("time", ["10", "10:00", "01:00:00", "1-00", "1-00:30", "1-02:03:04"])
def test_times_of_slurm(tmp_path: Path, time: str) -> None:
    assert f"#SBATCH --time={time}\n" in make_script(tmp_path, time=time, save_seconds=60)


@pytest.mark.parametrize(
    ("code", "restarts", "last_save", "again"),
    [
        (0, 0, None, False),
        (0, 5, 3, False),
        (2, 0, None, False),
        (130, 0, None, False),
        (127, 0, None, False),
        (3, 0, None, True),
        (3, 100, None, True),
        (1, 0, None, True),
        (139, 1, None, True),
        (1, 2, None, False),
        (4, 9, 8, True),
        (5, 10, 8, False),
    ],
)
def test_which_exit_codes_restart_a_job(
    tmp_path: Path, code: int, restarts: int, last_save: int | None, again: bool
) -> None:
    """Two restarts in a row after crashes are allowed here. A save resets the count."""
    (tmp_path / "job.sh").write_text(make_script(tmp_path, max_crashes=2))
    if last_save is not None:
        (tmp_path / "run-7.restarts").write_text(f"{last_save}\n")
    environment = stand_ins(tmp_path, srun=f"#!/bin/bash\nexit {code}\n")
    if restarts:
        environment["SLURM_RESTART_COUNT"] = str(restarts)
    process = start(tmp_path, environment)
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert calls_of_scontrol(tmp_path) == (["requeue 7"] if again else []), printed
    assert ("restarting the job" in printed) == again
    assert ("not restarted" in printed) == (not again and code != 0)
    if code == 3:
        assert (tmp_path / "run-7.restarts").read_text() == f"{restarts + 1}\n"


def test_the_setups_variables_take_precedence_over_the_sites(tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("export NCCL_CROSS_NIC=0\nfalse\n")
    (tmp_path / "job.sh").write_text(make_script(tmp_path, "alps", setup="setup.sh"))
    process = start(tmp_path, stand_ins(tmp_path, srun='#!/bin/bash\necho "$NCCL_CROSS_NIC $NCCL_NET"\n'))
    assert process.communicate(timeout=PATIENCE)[0] == "0 AWS Libfabric\n"
    assert process.returncode == 0


def free_job_id() -> int:
    """Return a job id whose port (`rendezvous`) is free."""
    for job_id in range(os.getpid() % 10_000, 20_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 10_000 + job_id)):
                return job_id
    raise AssertionError("no port is free")


@pytest.mark.slow
def test_a_job_saves_at_the_signal_restarts_and_finishes(cli: Cli, tmp_path: Path, prefix: str) -> None:
    """Run two real ranks: SLURM's SIGUSR1 before the wall time ends, then the requeued job."""
    changes = {"parallel__dp": 2, "training__device": "cpu", "lr_scheduler__decay_style": "constant"}
    path = run_file(tmp_path, prefix, training__train_steps=100_000, **changes)
    assert cli("launch", "slurm", path, "--site", "generic", "--nodes", 1, "--output", tmp_path / "job.sh")[0] == 0
    assert "gpus" not in (tmp_path / "job.sh").read_text()
    environment = stand_ins(tmp_path, srun=SRUN.format(python=sys.executable))
    environment |= {"SLURM_JOB_ID": str(free_job_id()), "OMP_NUM_THREADS": "1"}
    requeue = f"requeue {environment['SLURM_JOB_ID']}"

    process = start(tmp_path, environment)
    try:
        metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 2, process)
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGUSR1)
        printed, _ = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGTERM)
            process.communicate(timeout=PATIENCE)
    assert process.returncode == 3, printed
    assert calls_of_scontrol(tmp_path) == [requeue]
    (saved,) = (tmp_path / "runs" / "run" / "checkpoints").glob("step_*")
    steps = int(saved.name.removeprefix("step_"))

    run_file(tmp_path, prefix, training__train_steps=steps + 2, **changes)
    process = start(tmp_path, environment | {"SLURM_RESTART_COUNT": "1"})
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, printed
    assert calls_of_scontrol(tmp_path) == [requeue]
    assert metrics.read_text().count("\n") == steps + 2
    assert not list(tmp_path.glob("*.restarts"))
