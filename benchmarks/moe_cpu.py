"""Training speed of a mixture of experts on a CPU: one run prints one table of ratios.

    python -m benchmarks.moe_cpu [--rounds 7] [--json results.json]

One process, two threads, fp32; a small model of the shape of Qwen3-MoE (128 experts, 8 for each token). The contenders
are transformers' own model, with its loop over the experts ("eager") and with grouped products ("grouped_mm", its
default). All live in one process and take their steps in turn; a ratio is the median over the rounds. Needs
``pip install fourfold[benchmarks]``.
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
from benchmarks.ranks import Times, fourfold, interleave, one_micro_batch_run, ratio, run_on_ranks

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
"""Qwen3-30B-A3B, an eighth as wide."""

GOAL = 1.2
"""Times as fast as the loop over experts."""

CONTENDERS = {"transformers, eager": "eager", "transformers, grouped_mm": "grouped_mm"}


def main() -> int:
    arguments = _arguments()
    warnings.filterwarnings("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    model, batch, length, rounds = MODEL, 8, 256, arguments.rounds
    if arguments.tiny:
        model, batch, length, rounds = {"preset": "moe-tiny"}, 2, 32, 1
    times = run_on_ranks(1, 2, time_one_process, model, batch, length, rounds)
    rows = []
    print(f"{'':28}{'tokens/s':>10}{'fourfold':>10}  goal")
    for name, seconds in times.items():
        speed = batch * length / statistics.median(seconds)
        goal = GOAL if name == "transformers, eager" else None
        times_as_fast = ratio(times, "fourfold", name)
        met = "" if goal is None else f"≥ {goal:g}  {'met' if times_as_fast >= goal else 'MISSED'}"
        print(f"{name:28}{speed:10.0f}{times_as_fast:9.2f}x  {met}")
        rows.append({"contender": name, "tokens_per_second": speed, "fourfold": times_as_fast, "goal": goal})
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


def time_one_process(model: dict[str, Any], batch: int, length: int, rounds: int) -> Times:
    run = one_micro_batch_run({}, batch, length, model)
    steps = {"fourfold": fourfold(run, CPU)}
    steps |= {name: hugging_face(run, CPU, experts=kind) for name, kind in CONTENDERS.items()}
    return interleave(steps, run, CPU, rounds, tolerance=1e-4)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of every contender")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    add_tiny(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
