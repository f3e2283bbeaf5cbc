"""Compare the speed of several ways to train a mixture-of-experts model on a CPU, with fourfold and with transformers.

    python -m benchmarks.moe_cpu [--rounds 7] [--only one|four] [--json results.json]

The model is small, in fp32, and has the shape of Qwen3-MoE (128 experts, 8 per token). The benchmark has two parts:

- "one" has one process with two threads. It compares fourfold with the model in transformers, which runs its experts in
  a loop ("eager") or as grouped matmuls ("grouped_mm", its default).
- "four" has four processes with one thread each, and the same global batch on two grids. It compares experts that are
  split over all processes (dp 4, ep 4) with a copy of all experts on each process (dp 4).

In each round, the same processes run one step of every variant. A ratio is the median over the rounds, with its
quartiles. Needs ``pip install fourfold[benchmarks]``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import add_tiny
from benchmarks.peers import hugging_face
from benchmarks.ranks import Times, fourfold, interleave, one_micro_batch_run, ratio, ratios, run_on_ranks

CPU = torch.device("cpu")

MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 768,
    "qk_norm": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 96,
}
"""Qwen3-30B-A3B's sizes, with an eighth of its width."""

CONTENDERS = {"transformers, eager": "eager", "transformers, grouped_mm": "grouped_mm"}
GRIDS: dict[str, dict[str, int]] = {"dp 4, ep 4": {"dp": 4, "ep": 4}, "dp 4": {"dp": 4}}
GOALS = {"transformers, eager": 1.2, "dp 4": 0.9}
"""Goals: the smallest ratio of speeds that we accept, for each variant."""


def main() -> int:
    arguments = _arguments()
    warnings.filterwarnings("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    model, batch, length, rounds = MODEL, 8, 256, arguments.rounds
    if arguments.tiny:
        model, batch, length, rounds = {"preset": "moe-tiny"}, 4, 32, 1
    rows = []
    print(f"{'':28}{'tokens/s':>10}{'ratio':>8}{'quartiles':>14}  goal")
    for part in PARTS if arguments.only is None else [arguments.only]:
        processes, threads, timed = PARTS[part]
        times = run_on_ranks(processes, threads, timed, model, batch, length, rounds)
        ours = next(iter(times))
        rows += [_row(times, ours, name, batch * length) for name in times]
    if arguments.json:
        record = {
            "torch": torch.__version__,
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "model": model,
            "batch": batch,
            "seq_length": length,
            "rounds": rounds,
            "rows": rows,
        }
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _row(times: Times, ours: str, name: str, tokens: int) -> dict[str, Any]:
    """Print how many times as fast the step ``ours`` is as the step ``name``, and return the table row of ``name``."""
    speed, goal = tokens / statistics.median(times[name]), GOALS.get(name)
    every, found = ratios(times, ours, name), ratio(times, ours, name)
    low, _, high = statistics.quantiles(every, n=4) if len(every) > 1 else every * 3
    met = "" if goal is None else f"≥ {goal:g}  {'met' if found >= goal else 'MISSED'}"
    print(f"{name:28}{speed:10.0f}{found:7.2f}x{f'{low:.2f} to {high:.2f}':>14}  {met}", flush=True)
    return {"contender": name, "tokens_per_second": speed, "ratio": found, "quartiles": [low, high], "goal": goal}


def time_one_process(model: dict[str, Any], batch: int, length: int, rounds: int) -> Times:
    run = one_micro_batch_run({}, batch, length, model)
    steps = {"fourfold": fourfold(run, CPU)}
    steps |= {name: hugging_face(run, CPU, experts=kind) for name, kind in CONTENDERS.items()}
    return interleave(steps, run, CPU, rounds, tolerance=1e-4)


def time_four_processes(model: dict[str, Any], batch: int, length: int, rounds: int) -> Times:
    runs = {name: one_micro_batch_run(grid, batch, length, model) for name, grid in GRIDS.items()}
    return interleave({name: fourfold(run, CPU) for name, run in runs.items()}, runs["dp 4"], CPU, rounds, 1e-4)


PARTS = {"one": (1, 2, time_one_process), "four": (4, 1, time_four_processes)}
"""For each part, the number of processes, the number of threads per process, and the function that they run."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="number of timed steps of every variant")
    parser.add_argument("--only", choices=PARTS, help="one of the two parts")
    parser.add_argument("--json", metavar="FILE", help="also write the table to this file")
    add_tiny(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
