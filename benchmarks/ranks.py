"""Start the processes of a benchmark, and compare the times of several training steps, called contenders."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks.peers import Step, my_rows
from fourfold.config.model import IGNORE_INDEX
from fourfold.config.run import RunConfig
from fourfold.data.loader import MicroBatch
from fourfold.parallel.grid.grid import Grid
from fourfold.run_file.load import make_run
from fourfold.training.job import Job

Times = dict[str, list[float]]
"""The step times of every contender in seconds. There is one time for each round."""


def run_on_ranks(world: int, threads: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Start ``world`` new processes with ``threads`` threads each, and join them in a gloo group. Each process calls
    ``function(*arguments)``. Return the result of rank 0."""
    # A process reads OMP_NUM_THREADS when it loads the OpenMP library, so set it before the processes start.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        processes = [
            context.Process(target=_rank, args=(rank, world, threads, rendezvous, results, function, arguments))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and results.empty():
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.1)
        failed = results.empty()
        result = None if failed else results.get()
        for process in processes:
            if failed:
                process.terminate()
            process.join()
    if failed:
        raise RuntimeError(f"a process of {function.__name__} failed; its error is above")
    return result


def _rank(
    rank: int,
    world: int,
    threads: int,
    rendezvous: str,
    results: Any,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    result = function(*arguments)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()


def one_micro_batch_run(
    parallel: dict[str, int],
    batch: int,
    seq_length: int,
    model: dict[str, Any],
    overlap: dict[str, Any] | None = None,
    **training: Any,
) -> RunConfig:
    """Return a run with one micro-batch per step, and with a constant learning rate."""
    ranks = parallel.get("dp", 1) * parallel.get("z", 1)
    return make_run(
        {
            "model": model,
            "data": {"source": "python-stdlib"},
            "parallel": parallel,
            "training": {
                "micro_batch_size": batch // ranks,
                "global_batch_size": batch,
                "seq_length": seq_length,
                "train_steps": 1000,
                **training,
            },
            "overlap": overlap or {},
            "lr_scheduler": {"decay_style": "constant"},
        }
    )


def fourfold(run: RunConfig, device: torch.device, quick_weights: bool = False, grid: Grid | None = None) -> Step:
    """Return fourfold's own training step.

    Args:
        quick_weights: Whether to draw the initial weights directly on the device. This is faster for large models, but
            the weights then depend on the grid.
        grid: An existing grid with the run's sizes. By default, a new grid is made.
    """
    grid = Grid(run.parallel, device.type) if grid is None else grid
    job = Job(run, grid, device)
    if quick_weights:
        draw_quickly(job)
    else:
        job.initialize(run.training.seed)
    rank, ranks = grid.batch.rank, grid.batch.size

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        micro_batch = MicroBatch(my_rows(tokens_BS, rank, ranks), my_rows(labels_BS, rank, ranks))
        return job.train_step([micro_batch], 0).loss

    return step


def draw_quickly(job: Job) -> None:
    """Draw this rank's initial weights directly on its device. The weights of the full model then depend on the
    grid."""
    for shard in job.shards:
        shard.local.fill_(1.0) if len(shard.global_shape) == 1 else shard.local.normal_(0.0, 0.02)
    job.publish()


def random_batch(run: RunConfig, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random tokens and their labels, both [B, S]. The last token of a sequence has no label, as in
    transformers."""
    shape = (run.training.global_batch_size, run.training.seq_length)
    tokens = torch.randint(0, run.model.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
    labels = torch.cat([tokens[:, 1:], torch.full((shape[0], 1), IGNORE_INDEX)], dim=1)
    return tokens.to(device), labels.to(device)


def one_step(step: Step, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Run one step on all processes. Return the seconds until all processes are done, and the loss."""
    dist.barrier()
    begin = time.perf_counter()
    loss = step(*batch).item()
    dist.barrier()
    return time.perf_counter() - begin, loss


def interleave(
    steps: dict[str, Step],
    run: RunConfig,
    device: torch.device,
    rounds: int,
    tolerance: float,
    limits: dict[str, Step] | None = None,
    warm_ups: int = 1,
) -> Times:
    """Time the steps of several contenders. Each round runs one step of every contender.

    Every contender first takes one untimed step. All contenders start from the same weights, so the losses of these
    steps must agree within ``tolerance``. Otherwise, the contenders do different work, and the comparison is invalid.

    Args:
        limits: More functions to time in the same rounds, such as a step without communication. Their losses are not
            compared.
        warm_ups: Number of additional untimed steps.
    """
    timed = steps | (limits or {})
    losses = {name: one_step(step, random_batch(run, 0, device))[1] for name, step in timed.items()}
    first = losses[next(iter(steps))]
    for name in steps:
        assert abs(losses[name] - first) < tolerance, f"{name} does other work: first losses are {losses}"
    for i in range(warm_ups):
        for step in timed.values():
            one_step(step, random_batch(run, 1 + i, device))
    times: Times = {name: [] for name in timed}
    for i in range(rounds):
        batch = random_batch(run, 1 + warm_ups + i, device)
        for name, step in timed.items():
            times[name].append(one_step(step, batch)[0])
    return times


def ratio(times: Times, ours: str, theirs: str) -> float:
    """Return how many times as fast the contender ``ours`` is as the contender ``theirs``: the median of the rounds'
    ratios."""
    return statistics.median(ratios(times, ours, theirs))


def ratios(times: Times, ours: str, theirs: str) -> list[float]:
    """Return for each round how many times as fast the contender ``ours`` is as the contender ``theirs``."""
    return [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
