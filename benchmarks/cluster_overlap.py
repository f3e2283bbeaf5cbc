"""Measure on an emulated cluster how much communication each switch of ``[overlap]`` hides.

    bash benchmarks/cluster.sh overlap [--grid x=2,z=2] [--rounds 5] [--json FILE]

Each row of the table is a step with a different set of switches. In each round, the same processes run every step once.
Two rows are limits: *computation* is a step whose collectives only copy local data, and *communication* runs only the
step's collectives, one after another. The column *exposed* shows the communication that is not hidden: the time by
which a step is longer than *computation*, as a fraction of *communication*. To measure the switch ``shards_per_node``
too, set PER_NODE=2 and z=4.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.accelerators import accelerators
from benchmarks.cluster_runs import ALL, CPU, NONE, add_cluster, cluster_run, grid_of, products, size_of
from benchmarks.limits import communication_of, without_communication
from benchmarks.ranks import fourfold, interleave, random_batch
from fourfold.parallel.grid.grid import Grid

ACTS_ON = {
    "input_gradients": "xy",
    "gate_sum": "y",
    "weight_prefetch": "z",
    "batch_parts": "xy",
    "shards_per_node": "z",
}
"""For each switch of ``[overlap]``, the axes whose collectives it hides."""


def main() -> int:
    arguments = _arguments()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    grid_sizes = grid_of(arguments.grid)
    every = ALL | {"shards_per_node": _shards_per_node(grid_sizes), "batch_parts": arguments.parts}
    contenders = {"none": NONE, "all": every}
    for name, value in every.items():
        if value == NONE[name] or arguments.switch not in (None, name):
            continue
        if not any(grid_sizes.get(axis, 1) > 1 for axis in ACTS_ON[name]):
            continue
        contenders[f"only {name}"] = {**NONE, name: value}
        contenders[f"all but {name}"] = {**every, name: NONE[name]}
    size = size_of(arguments)
    runs = {name: cluster_run(size, grid_sizes, overlap) for name, overlap in contenders.items()}
    plain = runs["none"]
    grid = Grid(plain.parallel, "cpu")
    steps = {name: fourfold(run, CPU, grid=grid) for name, run in runs.items()}
    limits = {
        "computation": without_communication(fourfold(plain, CPU, grid=grid)),
        "communication": communication_of(fourfold(plain, CPU, grid=grid), random_batch(plain, 0, CPU)),
    }
    with accelerators(arguments.gflops):
        times = interleave(steps, plain, CPU, arguments.rounds, 1e-4, limits, warm_ups=0)
    if dist.get_rank() == 0:
        rows = _rows(times)
        _print(arguments, rows)
        if arguments.json:
            record = {"grid": grid_sizes, "rate": arguments.rate, "torch": torch.__version__, "rows": rows}
            Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    return 0


def _shards_per_node(grid_sizes: dict[str, int]) -> int:
    """Return the number of ranks of z on each node, from the number of processes per node that torchrun has set."""
    tensor = grid_sizes.get("x", 1) * grid_sizes.get("y", 1)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // tensor
    return per_node if 1 < per_node < grid_sizes.get("z", 1) else 1


def _rows(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return each row's median seconds, and the medians of three ratios. Each ratio compares two times of the same
    round.

    - faster: speed relative to the step without overlap.
    - over_longer: time divided by the time of *computation* or *communication*, whichever takes longer.
    - exposed: time in addition to *computation*, as a fraction of the time of *communication*.
    """
    alone = [max(pair) for pair in zip(times["computation"], times["communication"], strict=True)]
    rows = {}
    for name, seconds in times.items():
        faster = [b / a for a, b in zip(seconds, times["none"], strict=True)]
        over = [a / b for a, b in zip(seconds, alone, strict=True)]
        both = zip(seconds, times["computation"], times["communication"], strict=True)
        exposed = [(step - computation) / communication for step, computation, communication in both]
        rows[name] = {
            "seconds": statistics.median(seconds),
            "faster": statistics.median(faster),
            "least": min(faster),
            "most": max(faster),
            "over_longer": statistics.median(over),
            "exposed": statistics.median(exposed),
        }
    return rows


def _print(arguments: argparse.Namespace, rows: dict[str, dict[str, float]]) -> None:
    where = f"{dist.get_world_size()} processes, {arguments.rate} a link of a node{products(arguments)}"
    print(f"{where}, {arguments.grid}, {arguments.rounds} rounds")
    print(f"{'':26}{'seconds':>9}{'× none':>9}{'least':>7}{'most':>7}{'to the longer':>15}{'exposed':>9}")
    for name, row in rows.items():
        print(
            f"{name:26}{row['seconds']:9.2f}{row['faster']:9.2f}{row['least']:7.2f}{row['most']:7.2f}"
            f"{row['over_longer']:15.2f}{row['exposed']:9.0%}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--grid", default="x=2,z=2", help="sizes of x, y, z and dp, one process for each position")
    parser.add_argument(
        "--parts",
        type=int,
        default=ALL["batch_parts"],
        help="value of batch_parts, at most the sequences of one process",
    )
    parser.add_argument("--switch", choices=ACTS_ON, help="measure only this switch")
    add_cluster(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
