"""Measure the processor time that rank 0 needs to start, save, and resume a job of up to 32,768 processes.

    python -m benchmarks.scale [--ranks 512 4096 32768] [--folder DIR]

Only rank 0 really runs. torch's fake process group stands for all other ranks. Their checkpoint files exist, but most
of them have a single byte. The model has as many tensors as gpt-320b, but smaller tensors, because the time to write
many bytes depends on the disk and the network. The figures do not include the time that NCCL needs to connect, or the
latency of a file system with this many clients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import xxhash
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.options import add_tiny
from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.checkpoints.file_layout import CheckpointTensors, file_of, read_layout
from fourfold.checkpoints.global_tensors import layout_of, trained_parts
from fourfold.checkpoints.rank_files import dtype_of
from fourfold.config.run import RunConfig
from fourfold.models.tensor_files import Entry, Written, write_tensors
from fourfold.parallel.grid.grid import Grid
from fourfold.run_file.load import make_run
from fourfold.training.job import Job

GRIDS = {
    8: {"x": 2, "z": 4},
    512: {"x": 8, "z": 64},
    4096: {"x": 8, "y": 2, "z": 64, "dp": 4},
    32768: {"x": 8, "y": 4, "z": 64, "dp": 16},
}
ONE_BYTE = b"\0"


class Costs(NamedTuple):
    """Time and memory that rank 0 of a job needs."""

    ranks: int
    groups: float
    """Number of seconds to find out which process groups the grid needs, and to create them."""
    model: float
    """Number of seconds to create the model and its optimizer."""
    save: float
    """Number of seconds that a save takes. Training waits during this time."""
    resume: float
    """Number of seconds that rank 0 needs to find, check, and read its tensors in a checkpoint."""
    opened: int
    """Number of files that rank 0 reads if the grid has not changed."""
    opened_elsewhere: int
    """Number of files that rank 0 reads if z is half as large as on the grid that wrote the checkpoint."""
    memory: float
    """Peak of the resident memory, in GiB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 4096, 32768], choices=list(GRIDS))
    parser.add_argument("--folder", type=Path, help="A folder on the disk to measure. Default: a temporary one.")
    add_tiny(parser)
    arguments = parser.parse_args()
    layers, width = (2, 256) if arguments.tiny else (96, 2048)
    times = "groups, s | model, s | save, s | resume, s"
    print(f"| processes | {times} | files read | files read with z / 2 | memory, GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in [8] if arguments.tiny else arguments.ranks:
        folder = Path(tempfile.mkdtemp(dir=arguments.folder))
        try:
            # Use a new process for each job, so that its peak memory belongs to this job only.
            with multiprocessing.get_context("spawn").Pool(1) as fresh:
                costs = fresh.apply(costs_of, (ranks, layers, width, folder))
        finally:
            shutil.rmtree(folder)
        print(
            f"| {costs.ranks:,} | {costs.groups:.1f} | {costs.model:.1f} | {costs.save:.2f} | {costs.resume:.2f} "
            f"| {costs.opened} | {costs.opened_elsewhere} | {costs.memory:.2f} |",
            flush=True,
        )


def costs_of(ranks: int, layers: int, width: int, folder: Path) -> Costs:
    """Run rank 0 of a job with this many ranks: start, save, and resume. Return its costs."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    run = run_of(ranks, layers, width)
    begin = time.perf_counter()
    grid = Grid(run.parallel, "cpu")
    groups = time.perf_counter() - begin
    begin = time.perf_counter()
    job = Job(run, grid, torch.device("cpu"))
    job.initialize(0)
    model = time.perf_counter() - begin
    with the_others(job, folder / ".step_1.partial") as away:
        begin = time.perf_counter()
        Checkpointer(folder, job, run.checkpoint).save(1)
        save = time.perf_counter() - begin - away[0]
    begin = time.perf_counter()
    load_checkpoint(folder / "step_1", job)
    resume = time.perf_counter() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    layout = read_layout(folder / "step_1")
    opened, elsewhere = files_read(layout, job), files_read_on_half_of_z(layout, job)
    return Costs(ranks, groups, model, save, resume, len(opened), len(elsewhere), memory)


def run_of(ranks: int, layers: int, width: int) -> RunConfig:
    return make_run(
        {
            "model": {
                "preset": "gpt-320b",
                "hidden_size": width,
                "intermediate_size": 4 * width,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "num_hidden_layers": layers,
            },
            "data": {"source": "python-stdlib"},
            "parallel": GRIDS[ranks],
            "training": {
                "micro_batch_size": 1,
                "global_batch_size": 1024,
                "seq_length": 2048,
                "train_steps": 1,
                "precision": "bf16",
                "device": "cpu",
            },
        }
    )


@contextmanager
def the_others(job: Job, folder: Path) -> Iterator[list[float]]:
    """Stand in for all other ranks during a save of rank 0. When rank 0 gathers the checksums of all files, write the
    files of the other ranks. Yield a list with the seconds that this took, which are not part of rank 0's costs."""
    away = [0.0]

    def gathered(mine: Written, _: str) -> list[Written]:
        begin = time.perf_counter()
        layout = layout_of(trained_parts(job, with_averages=False), job.grid)
        read = files_read(layout, job)
        others = [written_by(rank, layout, folder, whole=rank in read) for rank in range(1, dist.get_world_size())]
        away[0] += time.perf_counter() - begin
        return [mine, *others]

    with (
        patch("fourfold.checkpoints.rank_files.from_all_ranks", gathered),
        # Skip the check of free space, which would count full-size files. Here most files have one byte.
        patch("fourfold.checkpoints.checkpoint.check_room"),
    ):
        yield away


def written_by(rank: int, layout: CheckpointTensors, folder: Path, whole: bool) -> Written:
    """Write the checkpoint file of another rank, or a file of one byte if ``whole`` is false. Return what this rank
    would send to rank 0."""
    path, entries = folder / file_of(rank), []
    if not whole:
        path.write_bytes(ONE_BYTE)
        return Written(1, xxhash.xxh3_128_hexdigest(ONE_BYTE))
    for name, box in layout.held_by(rank).items():
        shape = tuple(each.stop - each.start for each in box)
        entries.append(Entry(name, dtype_of(layout, name), shape, partial(torch.zeros, shape)))
    return write_tensors(path, entries)


def files_read(layout: CheckpointTensors, job: Job) -> set[int]:
    """Return the ranks whose files rank 0 reads when it resumes, because they contain a part of its tensors."""
    parts = trained_parts(job, with_averages=False).items()
    found = (layout.parts(name, part.shard.slices) for name, part in parts if part.local.numel())
    return {rank for parts in found for rank, _ in parts}


def files_read_on_half_of_z(layout: CheckpointTensors, job: Job) -> set[int]:
    """Return the ranks whose files rank 0 reads if it resumes with half of z. Rank 0 then holds twice as many rows of
    each tensor."""
    files = set()
    for name, part in trained_parts(job, with_averages=False).items():
        if part.local.numel():
            rows, *rest = part.shard.slices
            twice = slice(rows.start, min(rows.start + 2 * len(part.local), part.shard.global_shape[0]))
            files |= {rank for rank, _ in layout.parts(name, (twice, *rest))}
    return files


if __name__ == "__main__":
    main()
