"""The bubble of real pipelines on a CPU, from their own timelines, beside the formula's and the schedule's.

    python -m benchmarks.pipeline_bubble [--pp 2] [--steps 5] [--json results.json]

Idle is a rank's time between the first operation of any rank and the last, less what it computes; the share is the
median over the steps. Every rank needs a core of its own, or it waits for that too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.options import add_tiny
from benchmarks.ranks import run_on_ranks
from fourfold.config.run import RunConfig
from fourfold.parallel.grid import Grid
from fourfold.parallel.schedule import bubble, schedule_ops, timeline
from fourfold.run_file.load import make_run
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
MICRO_BATCHES = (4, 16)
MODEL = {"preset": "llama-tiny", "hidden_size": 256, "head_dim": 32, "intermediate_size": 704, "num_hidden_layers": 8}
COMPUTED = ("F", "B", "I", "W")


def run_of(pp: int, schedule: str, micro_batches: int) -> RunConfig:
    return make_run(
        {
            "model": MODEL,
            "data": {"source": "python-stdlib"},
            "parallel": {"pp": pp, "schedule": schedule},
            "training": {
                "micro_batch_size": 2,
                "global_batch_size": 2 * micro_batches,
                "seq_length": 256,
                "train_steps": 100,
                "device": "cpu",
            },
        }
    )


def idle_shares(run: RunConfig, steps: int) -> list[float]:
    """Of every step after the first."""
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    job.initialize(0)
    shares = []
    for step in range(steps + 1):
        micro_batches = random_micro_batches(run, step, job.grid, job.device)
        dist.barrier()
        job.train_step(micro_batches, step)
        spans, waits = job.pipeline.spans, job.pipeline.waits
        busy = sum(span.end - span.begin for span in spans if span.op.kind in COMPUTED)
        busy -= sum(wait.end - wait.begin for wait in waits)
        everyone: list[tuple[float, float, float]] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (spans[0].begin, spans[-1].end, busy))
        begins, ends, busies = zip(*everyone, strict=True)
        shares.append(1 - sum(busies) / (len(busies) * (max(ends) - min(begins))))
    return shares[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    add_tiny(parser)
    arguments = parser.parse_args()
    schedules, counts = (("1F1B",), (2,)) if arguments.tiny else (SCHEDULES, MICRO_BATCHES)
    rows = []
    print("| schedule | micro-batches | measured | op list | 1F1B's formula |\n|---|---|---|---|---|")
    for schedule in schedules:
        for micro_batches in counts:
            run = run_of(arguments.pp, schedule, micro_batches)
            measured = statistics.median(run_on_ranks(arguments.pp, 1, idle_shares, run, arguments.steps))
            planned = bubble(timeline(schedule_ops(run.parallel, micro_batches), run.parallel))
            formula = (arguments.pp - 1) / (micro_batches + arguments.pp - 1)
            rows.append(
                {
                    "schedule": schedule,
                    "micro_batches": micro_batches,
                    "measured": measured,
                    "op_list": planned,
                    "formula": formula,
                }
            )
            print(f"| {schedule} | {micro_batches} | {measured:.1%} | {planned:.1%} | {formula:.1%} |", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
