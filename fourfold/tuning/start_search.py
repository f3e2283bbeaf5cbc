"""Build a search from a run file and the options of ``fourfold tune``."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import writing
from fourfold.errors import UserError
from fourfold.launch.job_scripts.slurm_script import SlurmJob
from fourfold.launch.job_scripts.slurm_site import load_site
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.machines.machine import Machine, load_machine
from fourfold.planning.request import request_from_options
from fourfold.planning.search.limits import parse_limits
from fourfold.tuning.candidates import search_candidates
from fourfold.tuning.trial_process import LocalTrial, SlurmTrial
from fourfold.tuning.tuner import Search, Settings, Start, Subject

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Environment variables that select the GPUs of a process."""


def search_for(
    run_file: Path,
    *,
    overrides: Sequence[str] = (),
    nproc: int | None = None,
    machine_name: str | None = None,
    space: Sequence[str] = (),
    folder: Path | None = None,
    settings: Settings,
    site: str | None = None,
    job: SlurmJob | None = None,
    report: Callable[[str], None],
) -> tuple[Search, Machine]:
    """Build a search. Also return the machine as its file describes it, because --memory-limit changes the memory of
    the machine in the search.

    If ``settings.at_once`` is 0, as many trials run at once as the GPUs of this machine allow. On a CPU or with SLURM,
    one trial runs at a time.

    Args:
        run_file: The run file to tune.
        overrides: Overrides of the run file.
        nproc: Number of devices of a trial. Default: the run file's number of processes.
        machine_name: The planner's machine. Default: metrics.machine, or "laptop" on a CPU.
        space: Limits on the layouts, in the format of ``limits.parse_limits``.
        folder: The search's folder. Default: tune-NAME.
        settings: Settings of the search.
        site: The SLURM site to run trials on. None runs them on this machine.
        job: Settings of the SLURM jobs. Needed with a site.
        report: Called with each line of progress.

    Raises:
        UserError: An option or the run file is invalid, no layout is legal and may fit, the machine has too few GPUs,
            sbatch is missing, or the folder belongs to another search.
    """
    request = request_from_options(run_file=run_file, overrides=overrides, gpus=nproc)
    assert request.run is not None
    gpus_here = _gpus_here(request.run, site)
    on_gpu = gpus_here > 0 or (site is not None and request.run.training.device != "cpu")
    base = load_machine(_machine_name(machine_name, request.run, on_gpu))
    machine = base if settings.memory_limit is None else replace(base, memory=settings.memory_limit)
    constants = constants_for(base)
    candidates = search_candidates(
        request.base, machine, constants, request.gpus, parse_limits(space, "--space"), on_gpu
    )
    if settings.at_once == 0:
        settings = replace(settings, at_once=max(1, gpus_here // request.gpus) if site is None else 1)
    if on_gpu and site is None and gpus_here < request.gpus * settings.at_once:
        raise UserError(
            f"{settings.at_once} trials at once of {request.gpus} devices need more than the {gpus_here} GPUs of this "
            "machine; use --slurm, or lower --nproc or --at-once"
        )
    folder = folder or Path(f"tune-{request.name}")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    start = _locally(request.gpus if on_gpu else 0) if job is None else _by_slurm(site or "generic", job)
    return Search(Subject(request, candidates, constants, on_gpu), settings, folder, start, report), base


def _gpus_here(run: RunConfig, site: str | None) -> int:
    """Return the number of GPUs on this machine that trials may use. It is 0 if the run uses the CPU, or if SLURM runs
    the trials."""
    if site is not None or run.training.device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _machine_name(given: str | None, run: RunConfig, on_gpu: bool) -> str:
    name = given or run.metrics.machine or (None if on_gpu else "laptop")
    if name is None:
        raise UserError(
            "--machine is missing; give a machine of the planner, or a file that `fourfold machine calibrate` writes, "
            "so that the planner can order the trials"
        )
    return name


def _locally(gpus: int) -> Start:
    """Return a function that starts trials on this machine. Each concurrent trial gets ``gpus`` GPUs of its own. If
    ``gpus`` is 0, trials run on the CPU."""
    visible = next((os.environ[name] for name in VISIBLE if os.environ.get(name)), "")

    def start(run_file: Path, folder: Path, slot: int) -> LocalTrial:
        names = visible.split(",") if visible else [str(number) for number in range((slot + 1) * gpus)]
        own = ",".join(names[slot * gpus : (slot + 1) * gpus])
        return LocalTrial(run_file, folder, dict.fromkeys(VISIBLE, own) if gpus else {})

    return start


def _by_slurm(name: str, job: SlurmJob) -> Start:
    site = load_site(name, "--slurm")
    if shutil.which("sbatch") is None:
        raise UserError("--slurm needs sbatch, which is not on this machine; start the search on a login node")
    return lambda run_file, folder, slot: SlurmTrial(run_file, folder, site, job)
