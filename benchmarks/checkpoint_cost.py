"""Measure how much time checksums add to saving a checkpoint, and how much time verification adds to loading it.

    python -m benchmarks.checkpoint_cost [--hidden 512] [--rounds 7] [--folder DIR]

The benchmark has one process. It alternates between saves (or loads) with these checks and saves (or loads) without
them. A ratio is the time with checks divided by the time without checks. The benchmark prints the median, the smallest,
and the largest ratio.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.options import add_tiny
from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.config.run import CheckpointConfig
from fourfold.parallel.grid.grid import Grid
from fourfold.run_file.load import make_run
from fourfold.training.job import Job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="A folder on the disk to measure. Default: a temporary one.")
    add_tiny(parser)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.hidden, arguments.rounds = 32, 1
    store = dist.HashStore()  # type: ignore[attr-defined]  # this name is public
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    job = job_of(arguments.hidden)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    saves, loads, loads_again = [], [], []
    try:
        size = saved(job, folder)
        for _ in range(arguments.rounds):
            saves.append(ratio(lambda: saved(job, folder), unchecked_save))
            loads.append(
                ratio(lambda: loaded(job, folder), unchecked_load, before=lambda: drop_cache(folder / "step_1"))
            )
            loads_again.append(ratio(lambda: loaded(job, folder), unchecked_load))
    finally:
        shutil.rmtree(folder)
        dist.destroy_process_group()
    print(f"{size / 2**20:.0f} MiB, {arguments.rounds} rounds")
    for name, ratios in (("save", saves), ("load from disk", loads), ("load from page cache", loads_again)):
        print(f"{name}: {statistics.median(ratios):.3f} times ({min(ratios):.3f} to {max(ratios):.3f})")


def job_of(hidden: int) -> Job:
    """Return a job with a Llama of eight layers, its initial weights, and its optimizer's moments."""
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
    """Save the job, and return the size of the checkpoint in bytes."""
    Checkpointer(folder, job, CheckpointConfig()).save(1)
    return sum(file.stat().st_size for file in (folder / "step_1").iterdir())


@contextmanager
def unchecked_save() -> Iterator[None]:
    """Make saves skip checksums, the manifest, and the check that all values are finite."""
    with (
        patch("fourfold.models.tensor_files.xxhash"),
        patch("fourfold.checkpoints.checkpoint.gather_written"),
        patch("fourfold.checkpoints.checkpoint.seal"),
        patch("fourfold.checkpoints.checkpoint.check_finite"),
    ):
        yield


@contextmanager
def unchecked_load() -> Iterator[None]:
    """Make loads skip all checks of the files."""
    with (
        patch("fourfold.checkpoints.verify.check_contents"),
        patch("fourfold.checkpoints.verify.check_files"),
        patch("fourfold.checkpoints.verify.check_header"),
    ):
        yield


def ratio(
    call: Callable[[], object],
    unchecked: Callable[[], AbstractContextManager[None]],
    before: Callable[[], object] = lambda: None,
) -> float:
    """Return the time of a call with checks divided by its time without checks. Both variants run twice, in the order
    ABBA, so that neither variant profits from its position."""
    seconds = {True: 0.0, False: 0.0}
    for checks in (True, False, False, True):
        before()
        with nullcontext() if checks else unchecked():
            seconds[checks] += timed(call)
    return seconds[True] / seconds[False]


def loaded(job: Job, folder: Path) -> None:
    load_checkpoint(folder / "step_1", job)


def drop_cache(folder: Path) -> None:
    """Drop the files from the operating system's page cache, so that the next load reads them from the disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
