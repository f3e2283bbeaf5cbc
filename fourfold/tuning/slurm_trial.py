"""A trial as a SLURM job: ``sbatch --wait`` with the script of ``fourfold launch slurm``."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import replace
from pathlib import Path

from fourfold.data.files import write_output
from fourfold.launch.job_scripts.slurm_script import SlurmJob, slurm_script
from fourfold.launch.job_scripts.slurm_site import Site
from fourfold.run_file.load import load_run
from fourfold.tuning.trial_process import LOG, SUBMISSION

SCRIPT, JOB = "job.sh", "job_id.txt"
"""In the folder of a trial: its batch script, and the number that SLURM gave it."""


class SlurmTrial:
    """A job in the queue or on its nodes. Its output goes to the trial's log."""

    def __init__(self, run_file: Path, folder: Path, site: Site, job: SlurmJob) -> None:
        self._folder = folder
        own = [*job.sbatch, f"output={(folder / LOG).absolute()}", "no-requeue"]
        job = replace(job, sbatch=own, max_crashes=0)
        write_output(folder / SCRIPT, slurm_script(str(run_file), load_run(run_file), site, job))
        with (folder / JOB).open("wb") as answer, (folder / SUBMISSION).open("wb") as errors:
            self._process = subprocess.Popen(
                ["sbatch", "--wait", "--parsable", str(folder / SCRIPT)],
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=errors,
                start_new_session=True,
            )

    def has_started(self) -> bool:
        return (self._folder / LOG).is_file()

    def exit_code(self) -> int | None:
        return self._process.poll()

    def held_bytes(self) -> float | None:
        return None

    def end(self) -> None:
        cancel(self._folder)
        self._process.kill()
        self._process.wait()


def cancel(folder: Path) -> None:
    """Cancel the job of a trial, if it was ever submitted; nothing happens where it has ended."""
    path = folder / JOB
    number = path.read_text(encoding="utf-8").strip().partition(";")[0] if path.is_file() else ""
    if number:
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["scancel", number], check=False, capture_output=True)
