"""Jobs of tiny runs on the CPU."""

from __future__ import annotations

import torch

from fourfold.config.run import RunConfig
from fourfold.parallel.grid.grid import Grid
from fourfold.training.job import Job


def job_of(run: RunConfig) -> Job:
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    job.initialize(run.training.seed)
    return job
