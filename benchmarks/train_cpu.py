"""Compare fourfold's training speed on a CPU with other libraries.

    python -m benchmarks.train_cpu [--rounds 7] [--json results.json]

The table has several sections. In each round, the same processes run one step of every contender (library or variant)
of a section, so unrelated work on the machine slows all of them equally. A ratio is the median over the rounds. For
comparison, the table also has limits: a step without communication, and a step that runs only its matmuls and its
attention. Needs ``pip install fourfold[benchmarks]``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.limits import products_of, without_communication
from benchmarks.options import add_tiny
from benchmarks.peers import distributed_data_parallel, fsdp2_tensor_parallel, hugging_face
from benchmarks.ranks import (
    Times,
    fourfold,
    interleave,
    one_micro_batch_run,
    one_step,
    random_batch,
    ratio,
    run_on_ranks,
)
from fourfold.parallel.grid.grid import Grid

CPU = torch.device("cpu")

GRIDS: dict[str, dict[str, int]] = {
    "dp=4": {"dp": 4},
    "dp=4 zero=2": {"dp": 4, "zero": 2},
    "z=4": {"z": 4},
    "dp=2 z=2": {"dp": 2, "z": 2},
    "x=2 z=2": {"x": 2, "z": 2},
    "y=2 z=2": {"y": 2, "z": 2},
    "x=2 y=2": {"x": 2, "y": 2},
}
"""Grids for four processes."""

TENSOR_GRID = "x=2 z=2"
DDP_GOALS = {"fourfold dp=4": 0.95, "fourfold z=4": 0.95, "fourfold dp=2 z=2": 0.95}
NO_COMMUNICATION = ", no communication"
"""End of the name of the row for a grid's limit. The collectives of this row only copy local data."""
PRODUCTS_ALONE = "products and attention alone"
"""Name of the row with the limit of one process: fourfold's matmuls and attention, not compiled. All contenders call
the same kernels."""


@dataclass(frozen=True)
class Size:
    """The model, its batch, the number of rounds, and the grids to measure."""

    model: dict[str, Any]
    batch: int
    seq_length: int
    rounds: int
    grids: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One row of the table. ``goal`` is the smallest ratio that we accept, or with ``at_most`` the largest one."""

    section: str
    contender: str
    against: str
    tokens_per_second: float
    ratio: float
    goal: float | None = None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        met = self.ratio <= self.goal if self.at_most else self.ratio >= self.goal
        return f"{'≤' if self.at_most else '≥'} {self.goal:g}  {'met' if met else 'MISSED'}"


def main() -> int:
    arguments = _arguments()
    warnings.filterwarnings("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    size = Size({"preset": "llama-12m"}, 8, 256, arguments.rounds, tuple(GRIDS))
    if arguments.tiny:
        size = Size({"preset": "llama-tiny", "vocab_size": 512}, 4, 64, 1, (TENSOR_GRID,))
    rows = []
    for title, section in SECTIONS.items():
        # Without --only, skip section c, because compiling takes a minute.
        if title[0] not in (arguments.only or ("abd" if arguments.tiny else "abde")):
            continue
        print(f"\n{title}", flush=True)
        new = section(size)
        _print(new)
        rows += new
    if arguments.json:
        record = {
            "torch": torch.__version__,
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "model": size.model,
            "batch": size.batch,
            "seq_length": size.seq_length,
            "rounds": size.rounds,
            "rows": [asdict(row) for row in rows],
        }
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def one_process(size: Size) -> list[Row]:
    return _compared("a", size, ONE_PROCESS)


def compiled(size: Size) -> list[Row]:
    return _compared("e", size, COMPILED)


def _compared(letter: str, size: Size, comparisons: Comparisons) -> list[Row]:
    rows = []
    for section, pairs in comparisons.items():
        times = run_on_ranks(1, 2, _time_one_process, size, section)
        rows += [_row(f"{letter} {section}", size, times, ours, theirs, goal) for ours, theirs, goal in pairs]
    return rows


Comparisons = dict[str, list[tuple[str, str, float | None]]]

ONE_PROCESS: Comparisons = {
    "fp32": [
        ("fourfold", "Hugging Face", 1.0),
        ("Hugging Face", "Hugging Face", None),
        (PRODUCTS_ALONE, "Hugging Face", None),
    ],
    "bf16": [
        ("fourfold, bf16 weights", "HF, bf16 weights", 1.0),
        ("fourfold, fp32 master", "HF, autocast", 1.0),
        ("fourfold, fp32 master", "HF, bf16 weights", None),
        ("HF, bf16 weights", "HF, bf16 weights", None),
        ("HF, autocast", "HF, bf16 weights", None),
    ],
}
COMPILED: Comparisons = {
    "compiled": [
        ("fourfold, compiled", "Hugging Face", 1.2),
        ("fourfold, compiled", "HF, compiled", 1.05),
        ("HF, compiled", "Hugging Face", None),
        ("fourfold", "Hugging Face", None),
        (PRODUCTS_ALONE, "Hugging Face", None),
        (PRODUCTS_ALONE, "HF, compiled", None),
    ]
}
"""For each row: the contender, the contender that it is compared with, and the smallest ratio that we accept. A row has
such a goal only if both contenders use the same dtypes: weights in bf16, or float32 weights that are cast to bf16 for
the matmuls, as with autocast."""


def _time_one_process(size: Size, section: str) -> Times:
    def ours(**training: Any) -> Any:
        return fourfold(one_micro_batch_run({}, size.batch, size.seq_length, size.model, **training), CPU)

    run = one_micro_batch_run({}, size.batch, size.seq_length, size.model)
    limits = {} if section == "bf16" else {PRODUCTS_ALONE: products_of(ours(), random_batch(run, 0, CPU))}
    if section == "fp32":
        steps = {"fourfold": ours(), "Hugging Face": hugging_face(run, CPU)}
    elif section == "compiled":
        steps = {
            "fourfold": ours(),
            "fourfold, compiled": ours(compile=True),
            "Hugging Face": hugging_face(run, CPU),
            "HF, compiled": hugging_face(run, CPU, compiled=True),
        }
    else:
        steps = {
            "fourfold, fp32 master": ours(precision="bf16"),
            "fourfold, bf16 weights": ours(precision="bf16", master_weights="bf16", reduce_dtype="bf16"),
            "HF, bf16 weights": hugging_face(run, CPU, torch.bfloat16),
            "HF, autocast": hugging_face(run, CPU, autocast=torch.bfloat16),
        }
    return interleave(steps, run, CPU, size.rounds, 2e-2 if section == "bf16" else 1e-4, limits)


def four_processes(size: Size) -> list[Row]:
    times = run_on_ranks(4, 1, _time_four_processes, size)
    ours, peer = f"fourfold {TENSOR_GRID}", "FSDP2 + DTensor TP"
    rows = [_row("b", size, times, name, "DDP", DDP_GOALS.get(name)) for name in times if name != peer]
    for name, goal in {ours: 1.5, f"{TENSOR_GRID}{NO_COMMUNICATION}": None, peer: None}.items():
        rows.append(_row("c", size, times, name, peer, goal))
    return rows


def _time_four_processes(size: Size) -> Times:
    runs = {grid: one_micro_batch_run(GRIDS[grid], size.batch, size.seq_length, size.model) for grid in size.grids}
    grids = {name: Grid(run.parallel, "cpu") for name, run in runs.items()}
    steps = {f"fourfold {name}": fourfold(run, CPU, grid=grids[name]) for name, run in runs.items()}
    steps["DDP"] = distributed_data_parallel(runs[TENSOR_GRID])
    steps["FSDP2 + DTensor TP"] = fsdp2_tensor_parallel(runs[TENSOR_GRID])
    limits = {
        f"{name}{NO_COMMUNICATION}": without_communication(fourfold(run, CPU, grid=grids[name]))
        for name, run in runs.items()
    }
    return interleave(steps, runs[TENSOR_GRID], CPU, size.rounds, 1e-4, limits)


def first_steps(size: Size) -> list[Row]:
    rows = []
    for grid in size.grids:
        first, *others = run_on_ranks(4, 1, _time_first_steps, size, grid)
        second = others[0]
        tokens = size.batch * size.seq_length
        rows.append(Row("d", f"fourfold {grid}, first step", "its second", tokens / first, first / second, 3.0, True))
    return rows


def _time_first_steps(size: Size, grid: str) -> list[float]:
    run = one_micro_batch_run(GRIDS[grid], size.batch, size.seq_length, size.model)
    step = fourfold(run, CPU)
    return [one_step(step, random_batch(run, i, CPU))[0] for i in range(2)]


SECTIONS = {
    "a  one process, two threads": one_process,
    "b, c  four processes of one thread, fp32": four_processes,
    "d  first step, in fresh processes": first_steps,
    "e  one process, two threads, compiled": compiled,
}


def _row(section: str, size: Size, times: Times, ours: str, theirs: str, goal: float | None) -> Row:
    speed = size.batch * size.seq_length / statistics.median(times[ours])
    return Row(section, ours, theirs, speed, ratio(times, ours, theirs), goal)


def _print(rows: list[Row]) -> None:
    print(f"{'':12}{'':34}{'tokens/s':>10}{'ratio':>8}  {'to':22}goal")
    for row in rows:
        print(
            f"{row.section:12}{row.contender:34}{row.tokens_per_second:10.0f}{row.ratio:7.2f}x  {row.against:22}"
            f"{row.verdict}",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="number of timed steps of every contender")
    parser.add_argument("--only", default="", metavar="abde", help="letters of the sections to run")
    parser.add_argument("--json", metavar="FILE", help="also write the table to this file")
    add_tiny(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
