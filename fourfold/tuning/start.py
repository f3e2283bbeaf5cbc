"""Start the microbenchmark on every process of a job."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from fourfold.environment import read_environment
from fourfold.launch.job_processes import run_on_grid


def microbenchmark(processes: int | None) -> dict[str, Any] | None:
    """Run the microbenchmark on the processes of a launcher. Without a launcher, run it on ``processes`` local
    processes (default: one per GPU, or 2 without GPUs).

    Returns:
        The measured rates. Under a launcher, None on every process except the first.
    """
    import torch

    place = read_environment(os.environ)
    count = place.world_size if place is not None else processes or torch.cuda.device_count() or 2
    measured = run_on_grid("fourfold.tuning.microbenchmark:measure", [], count)
    return asdict(measured) if place is None or place.rank == 0 else None
