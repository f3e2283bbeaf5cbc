"""What checksums and verification add to a save and a load: each with and without, in turn, on one process.

    python -m benchmarks.checkpoint_cost [--hidden 512] [--rounds 7] [--folder DIR]

Prints the medians of the ratios of neighboring saves (and loads), with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from benchmarks.options import add_tiny
from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.config.run import CheckpointConfig
from fourfold.parallel.grid import Grid
from fourfold.run_file.load import make_run
from fourfold.training.job import Job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="On the disk to measure; default: a temporary one.")
    add_tiny(parser)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.hidden, arguments.rounds = 32, 1
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = job_of(arguments.hidden)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    saves, loads = [], []
    try:
        size = saved(job, folder)
        for _ in range(arguments.rounds):
            checked = timed(lambda: saved(job, folder))
            with_checks = timed(lambda: load_checkpoint(folder / "step_1", job))
            with patch("fourfold.checkpoints.checkpoint.verify_together"):
                without_checks = timed(lambda: load_checkpoint(folder / "step_1", job))
            with (
                patch("fourfold.checkpoints.global_tensors.ChecksummedFiles", FileSystem),
                patch("fourfold.checkpoints.checkpoint.seal"),
                patch("fourfold.checkpoints.checkpoint.check_finite"),
            ):
                plain = timed(lambda: saved(job, folder))
            saves.append(checked / plain)
            loads.append(with_checks / without_checks)
    finally:
        shutil.rmtree(folder)
        dist.destroy_process_group()
    print(f"{size / 2**20:.0f} MiB, {arguments.rounds} rounds")
    for name, ratios in (("save", saves), ("load", loads)):
        print(f"{name}: {statistics.median(ratios):.3f} times ({min(ratios):.3f} to {max(ratios):.3f})")


def job_of(hidden: int) -> Job:
    """A Llama of eight layers with its optimizer's moments."""
    run = make_run(
        {
            "model": {
                "preset": "llama-tiny",
                "hidden_size": hidden,
                "head_dim": hidden // 8,
                "intermediate_size": 4 * hidden,
                "num_hidden_layers": 8,
            },
            "data": {"source": "python-stdlib"},
            "training": {"global_batch_size": 1, "seq_length": 8, "train_steps": 1, "device": "cpu"},
        }
    )
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    job.initialize(0)
    return job


def saved(job: Job, folder: Path) -> int:
    """Save the job, and return the bytes of the checkpoint."""
    Checkpointer(folder, job, CheckpointConfig()).save(1)
    return sum(file.stat().st_size for file in (folder / "step_1").iterdir())


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
