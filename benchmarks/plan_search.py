"""Measure how fast the planner searches layouts: python -m benchmarks.plan_search [--rounds 5]

The benchmark measures the processor time of a complete search on one core. The fastest round counts, because other work
on the machine can only make a round slower.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.options import add_tiny
from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of_model
from fourfold.planning.search.fastest import search

CASES = (("frontier-175b", 2048, 1536, "dgx-a100", 512), ("llama3-405b", 8192, 2048, "dgx-h100", 16_384))
TINY = (("llama3-8b", 2048, 64, "dgx-a100", 8),)
GOAL = 1_000_000
"""Goal: the number of layouts that the search must examine per second on one core."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    add_tiny(parser)
    arguments = parser.parse_args()
    cases, rounds = (TINY, 1) if arguments.tiny else (CASES, arguments.rounds)
    print(f"{'model':>14}{'machine':>10}{'GPUs':>8}{'layouts':>11}{'seconds':>9}{'a second':>10}  goal ≥ {GOAL:,}")
    missed = False
    for preset, seq, batch, name, gpus in cases:
        work = workload_of_model(ModelConfig(**PRESETS[preset])).but(seq_length=seq, global_batch_size=batch)
        times = []
        for _ in range(rounds):
            begin = time.process_time()
            found = search(work, load_machine(name), prior_constants(), gpus)
            times.append(time.process_time() - begin)
        rate = found.evaluated / min(times)
        missed |= rate < GOAL
        line = f"{preset:>14}{name:>10}{gpus:8,}{found.evaluated:11,}{min(times):9.2f}{rate:10,.0f}"
        print(f"{line}  {'met' if rate >= GOAL else 'MISSED'}", flush=True)
    return int(missed and not arguments.tiny)


if __name__ == "__main__":
    raise SystemExit(main())
