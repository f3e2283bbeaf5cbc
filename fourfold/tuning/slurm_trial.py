"""Run a trial as a SLURM job, with ``sbatch --wait`` and the script of ``fourfold launch slurm``."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from dataclasses import replace
from pathlib import Path

from fourfold.data.files import write_output
from fourfold.launch.job_scripts.slurm_script import SlurmJob, render_slurm_script
from fourfold.launch.job_scripts.slurm_site import Site
from fourfold.run_file.load import load_run
from fourfold.tuning.trial_process import LOG, SUBMISSION

SCRIPT = "job.sh"
"""Name of the batch script in a trial's folder."""
SAVE_SECONDS = 30
"""Seconds between the stop signal and the end of a job. A trial saves nothing, so this can be short."""


class SlurmTrial:
    """A trial as a SLURM job, waiting or running. What it prints goes to the trial's log."""

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
        return (self._folder / LOG).is_file()

    def exit_code(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        cancel(self._folder)
        self._process.kill()
        self._process.wait()


def cancel(folder: Path) -> None:
    """Cancel a trial's job. Do nothing if it was never submitted or has ended."""
    if (folder / SCRIPT).is_file():
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["scancel", f"--name={_job_name(folder)}"], check=False, capture_output=True)


def _job_name(folder: Path) -> str:
    """Return a unique job name, to cancel the job by. The job's number is unknown, because ``sbatch --wait`` prints it
    only after the job has ended."""
    return f"fourfold-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]}"
