"""fourfold parity"""

from __future__ import annotations

from typing import Annotated

import typer

from fourfold.cli.options import AsJson, Overrides, RunFile, show


def parity(
    run_file: RunFile,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 3,
    as_json: AsJson = False,
    overrides: Overrides = [],  # noqa: B006 (typer reads it, nobody writes it)
) -> None:
    """Check that the run file's grid computes what one process computes.

    Trains the model for a few steps in float32 on the grid and on one process, and compares the loss, every gradient,
    the clipped norm, the weights, and all of it again after saving, loading on another grid, and continuing. Exit
    code 1 if a difference is larger than rounding explains.
    """
    from fourfold.launch.job_processes import run_on_grid
    from fourfold.reports.terminal import parity_table
    from fourfold.run_file.load import load_run

    run = load_run(run_file, overrides)
    result = run_on_grid(
        "fourfold.verification.parity:parity_of_place",
        [run, steps],
        run.parallel.world_size,
        wanted_device=run.training.device,
    )
    if result is None:  # not the first process of a launcher's
        return
    show(result.record(), as_json, lambda _: parity_table(result))
    if not result.ok:
        raise typer.Exit(1)
