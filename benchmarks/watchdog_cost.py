"""Measure the cost of the watchdog's heartbeats: how long one takes, and what fraction of a step all of them take.

    python -m benchmarks.watchdog_cost [--rounds 20]

The benchmark uses the smallest preset, which is the worst case: a larger model has about as many heartbeats per step,
but longer steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import timeit
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.options import add_tiny
from benchmarks.ranks import run_on_ranks
from fourfold import heartbeat
from fourfold.heartbeat import SIZE, Heartbeat
from fourfold.parallel.grid.grid import Grid
from fourfold.run_file.load import make_run
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches

SIGNS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    add_tiny(parser)
    arguments = parser.parse_args()
    rounds, count, ranks = (2, 1000, 1) if arguments.tiny else (arguments.rounds, SIGNS, 2)
    memory = Heartbeat(_shared_memory())
    heartbeat.send_signs_to(memory)
    with_watchdog = min(timeit.repeat(_sign, number=count, repeat=5)) / count
    heartbeat.send_signs_to(None)
    without = min(timeit.repeat(_sign, number=count, repeat=5)) / count
    print(f"a heartbeat: {1e6 * with_watchdog:.2f} µs; without a watchdog {1e6 * without:.2f} µs")
    signs, seconds = run_on_ranks(ranks, 1, steps_on_grid, ranks, rounds)
    share = signs * with_watchdog / seconds
    print(f"llama-tiny on x {ranks}: {signs} signs in a step of {1e3 * seconds:.1f} ms (the fastest): {share:.3%}")


def steps_on_grid(ranks: int, rounds: int) -> tuple[int, float]:
    """Train some steps. Return the number of heartbeats per step, and the seconds of the fastest step."""
    training = {"global_batch_size": 8, "micro_batch_size": 2, "seq_length": 128, "train_steps": 1000}
    run = make_run(
        {
            "model": {"preset": "llama-tiny"},
            "data": {"source": "python-stdlib"},
            "parallel": {"x": ranks},
            "training": training,
        }
    )
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    job.initialize(0)
    memory = Heartbeat(_shared_memory())
    heartbeat.send_signs_to(memory)
    batches = random_micro_batches(run, 0, job.grid, job.device)
    seconds, counts = [], []
    for step in range(rounds):
        before = memory.read().number
        seconds.append(timeit.timeit(partial(job.train_step, batches, step), number=1))
        counts.append(memory.read().number - before)
        dist.barrier()
    return round(statistics.median(counts)), min(seconds)


def _sign() -> None:
    heartbeat.doing("layers.0.self_attn.qkv: tokens", "x")


def _shared_memory() -> int:
    descriptor = os.memfd_create("heartbeat")
    os.ftruncate(descriptor, SIZE)
    return descriptor


if __name__ == "__main__":
    main()
