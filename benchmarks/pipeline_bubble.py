"""Measure how long the ranks of real pipelines are idle (the bubble), and compare this with two predictions.

    python -m benchmarks.pipeline_bubble [--device cuda] [--pp 2] [--steps 5] [--json results.json]

One prediction is a simulation of the schedule's operations, and the other prediction is the usual formula for 1F1B. A
step lasts from the first operation of any rank to the last operation of any rank. In this time, a rank is idle if it
does not compute. The measured fraction is the median over the steps. On GPUs, the model has the blocks of Llama 3 8B,
and CUDA events measure the times. On a CPU, every rank needs its own core. Otherwise, ranks also wait for a free core.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.options import add_tiny
from benchmarks.pipeline_times import bubble, timeline
from benchmarks.ranks import draw_quickly
from benchmarks.stopwatch import Stopwatch
from benchmarks.train_gpu import LLAMA3_8B
from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.launch.job_processes import choose_device, run_on_grid
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.pipeline.schedule import schedule_ops
from fourfold.run_file.load import make_run
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
MICRO_BATCHES = (2, 8)
"""Numbers of micro-batches in a step, divided by the number of pipeline ranks."""

MODEL = {"preset": "llama-tiny", "hidden_size": 256, "head_dim": 32, "intermediate_size": 704, "num_hidden_layers": 8}
COMPUTED = ("F", "B", "I", "W")


def run_of(pp: int, schedule: str, micro_batches: int, device: str) -> RunConfig:
    small: dict[str, Any] = {"micro_batch_size": 2, "seq_length": 256}
    large: dict[str, Any] = {"micro_batch_size": 1, "seq_length": 4096, "precision": "bf16"}
    sizes = large if device == "cuda" else small
    return make_run(
        {
            "model": {**LLAMA3_8B, "num_hidden_layers": 4 * pp} if device == "cuda" else MODEL,
            "data": {"source": "python-stdlib"},
            "parallel": {"pp": pp, "schedule": schedule},
            "training": {
                **sizes,
                "global_batch_size": sizes["micro_batch_size"] * micro_batches,
                "train_steps": 100,
                "device": device,
            },
            "activation_checkpoint": {"mode": "selective" if device == "cuda" else "none"},
        }
    )


def idle_shares(place: Place, run: RunConfig, steps: int) -> list[float]:
    """Train some steps. For every step except the first, return the fraction of the time that the ranks are idle."""
    device = choose_device(place, run.training.device)
    job = Job(run, Grid(run.parallel, device.type), device)
    draw_quickly(job)
    assert job.pipeline is not None
    stopwatch = Stopwatch(device)
    stopwatch.attach(job.pipeline)
    shares = []
    for step in range(steps + 1):
        micro_batches = random_micro_batches(run, step, job.grid, job.device)
        dist.barrier()
        stopwatch.start()
        job.train_step(micro_batches, step)
        spans, waits = stopwatch.spans(), stopwatch.waits()
        busy = sum(span.end - span.begin for span in spans if span.op.kind in COMPUTED)
        busy -= sum(wait.end - wait.begin for wait in waits)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (spans[0].begin, spans[-1].end, busy))
        begins, ends, busies = zip(*everyone, strict=True)
        shares.append(1 - sum(busies) / (len(busies) * (max(ends) - min(begins))))
    return shares[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    add_tiny(parser)
    arguments = parser.parse_args()
    schedules, counts = (("1F1B",), (1,)) if arguments.tiny else (SCHEDULES, MICRO_BATCHES)
    rows = []
    print("| schedule | micro-batches | measured | op list | 1F1B's formula |\n|---|---|---|---|---|")
    for schedule in schedules:
        for micro_batches in (arguments.pp * count for count in counts):
            run = run_of(arguments.pp, schedule, micro_batches, arguments.device)
            task = ("benchmarks.pipeline_bubble:idle_shares", [run, arguments.steps], arguments.pp)
            measured = statistics.median(run_on_grid(*task, wanted_device=arguments.device))
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
