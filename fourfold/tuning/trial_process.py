"""Run the processes of one trial: on this machine in their own process group, or as a SLURM job."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fourfold.data.atomic_files import write_output
from fourfold.launch.job_scripts.slurm_script import SlurmJob, render_slurm_script
from fourfold.launch.job_scripts.slurm_site import Site
from fourfold.processes import end_with_starter
from fourfold.run_file.load import load_run

LOG = "log.txt"
"""Name of the log in the trial's folder. It holds everything that the trial prints."""
SUBMISSION = "submission.txt"
"""Name of the file in the trial's folder for the batch system's messages, for example why it refuses a job."""


SCRIPT = "job.sh"
"""Name of the batch script in a trial's folder."""
SAVE_SECONDS = 30
"""Seconds between the stop signal and the end of a job. A trial saves nothing, so this can be short."""


class LocalTrial:
    """A trial that runs ``fourfold train`` on this machine, in its own process group. On Linux, the trial ends when
    this process ends."""

    def __init__(self, run_file: Path, folder: Path, environment: Mapping[str, str]) -> None:
        with (folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fourfold", "train", str(run_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | dict(environment),
                preexec_fn=end_with_starter,
            )

    def has_started(self) -> bool:
        """Return True, because a local trial starts immediately."""
        return True

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the trial runs."""
        return self._process.poll()

    def end(self) -> None:
        """End all processes of the trial immediately."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class SlurmTrial:
    """A trial that runs as a SLURM job. Its output goes to the trial's log."""

    def __init__(self, run_file: Path, folder: Path, site: Site, job: SlurmJob) -> None:
        self._folder = folder
        own = [*job.sbatch, f"output={(folder / LOG).absolute()}", "no-requeue", f"job-name={_job_name(folder)}"]
        job = replace(job, sbatch=own, max_crashes=0, save_seconds=SAVE_SECONDS)
        write_output(folder / SCRIPT, render_slurm_script(str(run_file), load_run(run_file), site, job))
        with (folder / SUBMISSION).open("wb") as errors:
            self._process = subprocess.Popen(
                ["sbatch", "--wait", str(folder / SCRIPT)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def has_started(self) -> bool:
        """Return whether the job has started to run, and is no longer waiting in the queue."""
        return (self._folder / LOG).is_file()

    def exit_code(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        cancel(self._folder)
        self._process.kill()
        self._process.wait()


TrialProcess = LocalTrial | SlurmTrial
"""A trial that is running, or waiting in a batch system's queue."""


def cancel(folder: Path) -> None:
    """Cancel a trial's SLURM job. Do nothing if the job was never submitted or has ended."""
    if (folder / SCRIPT).is_file():
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["scancel", f"--name={_job_name(folder)}"], check=False, capture_output=True)


def _job_name(folder: Path) -> str:
    """Return a unique job name, so that ``cancel`` finds the job. The job's number is unknown, because ``sbatch
    --wait`` prints it only after the job has ended."""
    return f"fourfold-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]}"


def kernel_kills() -> int | None:
    """Return how many processes the kernel has killed since boot because memory ran out, or None if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
