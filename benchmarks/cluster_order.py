"""Test on an emulated cluster whether the planner sorts grids in the order of their measured step times.

    bash benchmarks/cluster.sh order [--rounds 5] [--json FILE]

The planner uses the rates that ``fourfold machine calibrate`` measures on this cluster. No constant of the planner is
fitted to a step that the benchmark measures. In each round, the same processes run one grid after another.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.accelerators import accelerators
from benchmarks.cluster_runs import ALL, CPU, add_cluster, cluster_run, products, size_of
from benchmarks.ranks import fourfold, one_step, random_batch
from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.grid.process_group import ensure_process_group
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.machines.machine import Machine, load_machine
from fourfold.planning.machines.write import measured_machine
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.plan import predict
from fourfold.tuning.microbenchmark import measure

GRIDS: list[dict[str, int]] = [
    {"x": 4},
    {"y": 4},
    {"z": 4},
    {"dp": 4},
    {"x": 2, "y": 2},
    {"x": 2, "z": 2},
    {"y": 2, "z": 2},
    {"x": 2, "dp": 2},
    {"y": 2, "dp": 2},
    {"dp": 2, "z": 2},
]
"""Grids for four nodes."""


def main() -> int:
    arguments = _arguments()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    runs = {_name(grid): cluster_run(size_of(arguments), grid, ALL) for grid in GRIDS}
    ensure_process_group("cpu", world_size=4)
    with accelerators(arguments.gflops):
        machine = _this_cluster()
        times = _times(runs, arguments.rounds)
    if dist.get_rank() == 0:
        predicted = {
            name: float(predict(workload_of(run), machine, constants_for(machine)).seconds)
            for name, run in runs.items()
        }
        record = _record({name: statistics.median(seconds) for name, seconds in times.items()}, predicted)
        print(f"{len(GRIDS)} grids, {arguments.rate} a link{products(arguments)}, {arguments.rounds} rounds")
        print(f"{'':10}{'measured s':>12}{'predicted s':>13}")
        for name, row in record["grids"].items():
            print(f"{name:10}{row['measured']:12.2f}{row['predicted']:13.2f}")
        print(f"Spearman {record['spearman']:.2f}; the first choice takes {record['first_choice']:.2f} × the best")
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    return 0


def _times(runs: dict[str, RunConfig], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every grid's steps. Each round runs all grids, and all grids must compute the same
    losses."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    losses = set()
    for i in range(rounds):
        for name, run in runs.items():
            seconds, loss = _turn(run, i)
            times[name].append(seconds)
            losses.add(round(loss, 3))
        assert len(losses) == 1 + i, f"grids compute different losses: {losses}"
    return times


def _turn(run: RunConfig, number: int) -> tuple[float, float]:
    """Run two steps on a grid. Return the seconds of the second step, and the loss of the first step.

    The grid is destroyed afterwards, because the gloo threads of many grids would slow down a small machine.
    """
    grid = Grid(run.parallel, "cpu")
    step = fourfold(run, CPU, grid=grid)
    loss = one_step(step, random_batch(run, 2 * number, CPU))[1]
    seconds = one_step(step, random_batch(run, 2 * number + 1, CPU))[0]
    for group in {id(axis.group): axis.group for axis in grid.axes()}.values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    del step, grid
    gc.collect()
    return seconds, loss


def _this_cluster() -> Machine:
    """Return the machine file that ``fourfold machine calibrate`` would write if each process were a node. Every rank
    must call this, because the calibration runs collectives, but only the result of rank 0 is used."""
    place = Place(dist.get_rank(), 0, dist.get_world_size(), 1, launcher="torchrun")
    return measured_machine(asdict(measure(place)), load_machine("laptop"), "cluster")


def _record(measured: dict[str, float], predicted: dict[str, float]) -> dict[str, Any]:
    order = sorted(measured, key=lambda name: measured[name])
    x, y = (np.argsort(np.argsort([seconds[name] for name in order])) for seconds in (measured, predicted))
    first = min(predicted, key=lambda name: predicted[name])
    return {
        "grids": {name: {"measured": measured[name], "predicted": predicted[name]} for name in order},
        "spearman": float(np.corrcoef(x, y)[0, 1]),
        "first_choice": measured[first] / measured[order[0]],
    }


def _name(grid: dict[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in grid.items())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_cluster(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
