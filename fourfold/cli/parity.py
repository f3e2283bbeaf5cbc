"""`fourfold parity`: check that a grid computes what one process computes."""

from typing import Annotated, Literal

from typer import Exit, Option

from fourfold.cli.options import AsJson, Overrides, RunFile, show
from fourfold.data.progress import working


def parity(
    run_file: RunFile,
    steps: Annotated[int, Option(min=1, help="Training steps to compare.")] = 3,
    against: Annotated[
        Literal["plain", "transformers"],
        Option(help="The reference model: fourfold's own in plain PyTorch, or the transformers library's."),
    ] = "plain",
    as_json: AsJson = False,
    overrides: Overrides = [],  # noqa: B006 (typer only reads it)
) -> None:
    """Check that the run file's grid computes what one process computes.

    Trains the model for a few steps on the grid and, from the same weights, on one process in float64 and in float32.
    Compares the loss, the gradient norm, every gradient, and every weight. Then trains a short run with the trainer,
    resumes it on another grid, and compares it too. With --against transformers, also loads model.from_hf with the
    transformers library, and compares that model with fourfold's. The grid's error against float64 must be at
    most ten times the error of one process in float32. If it is larger, the exit code is 1.
    """
    from fourfold.launch.job_processes import run_on_grid
    from fourfold.reports.terminal import parity_table
    from fourfold.run_file.load import load_run

    run = load_run(run_file, overrides)
    with working("Training on the grid and on one process"):
        result = run_on_grid(
            "fourfold.verification.parity:parity_of_place",
            [run, steps, against],
            run.parallel.world_size,
            wanted_device=run.training.device,
        )
    if result is None:  # Under a launcher, only the first process has a result.
        return
    show(result.record(), as_json, lambda _: parity_table(result))
    if not result.ok:
        raise Exit(1)
