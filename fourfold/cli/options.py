"""Define the options that several commands share, and print a command's result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fourfold.planning.machines.names import machine_names

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a key of the run file. Repeatable. docs/run-file.md lists all keys.",
    ),
]
TASK_LIST = "`lm-eval ls tasks` lists them."
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
TaskLimit = Annotated[int | None, typer.Option("--limit", min=1, help="Documents per task. Default: all.")]
TaskFolder = Annotated[Path | None, typer.Option("--include-path", help="A folder of your own tasks.")]
MACHINES = f"The path of a machine file (.toml), or one of {', '.join(machine_names())}."
SITES = "frontier, perlmutter, alps, lumi, generic, or a file of your own (.toml)"
KNOBS = (
    "Axes: x, y, z, dp, cp, pp, ep. Sizes: micro_batch_size. batch_parts: 1, 2, 4. zero: 0, 1, 2, 3. recompute: none, "
    "selective, full. stages_per_rank: 1, 2, 3, 4, 6, 8. cp_method: ring, ulysses. schedule: 1F1B, Interleaved1F1B, "
    "InterleavedZeroBubble, ZBVZeroBubble, and, searched only if named, GPipe, LoopedBFS, DualPipeV."
)
"""Help text that lists the limits of a search and their values. ``planning.search.limits`` parses the limits that a
user gives."""
StoredDtype = Literal["auto", "fp32", "bf16", "fp16"]
"""Dtype of stored weights, for options. auto keeps the stored dtype."""


def show(record: dict[str, Any] | None, as_json: bool, tables: Callable[[dict[str, Any]], object]) -> None:
    """Print a record as JSON or as tables.

    Under a launcher, the record is None on every process except the first, and nothing is printed.
    """
    if record is not None:
        if as_json:
            print(json.dumps(record))
        else:
            tables(record)
