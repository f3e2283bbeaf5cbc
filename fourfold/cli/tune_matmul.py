"""fourfold machine tune-matmul"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fourfold.cli.options import AsJson, Overrides, RunFile, show
from fourfold.data.progress import working


def tune_matmul(
    run_file: RunFile,
    again: Annotated[
        bool, typer.Option("--again", help="Also measure sizes that are already in this machine's table.")
    ] = False,
    as_json: AsJson = False,
    overrides: Overrides = [],  # noqa: B006 (typer only reads it)
) -> None:
    """Find the fastest memory layouts for the run file's matmuls on this machine.

    Times the forward pass, the input gradient, and the weight gradient of every linear layer at the sizes of one rank,
    with transposed operands and with padded rows. A layout that is faster than the default, by more than the noise, is
    saved to a table in your cache directory. Runs with training.tuned_products read this table.
    """
    from fourfold.run_file.load import load_run

    run = load_run(run_file, overrides)
    # Import torch late, so that a mistake in the run file is reported immediately.
    from fourfold.matmul_tuning.matmul_choice import tune_matmuls

    with working("Timing the matmuls"):
        record = tune_matmuls(run, again)
    show(record, as_json, _print_tables)


def _print_tables(record: dict[str, Any]) -> None:
    from fourfold.reports.tables import print_table
    from fourfold.reports.tuned_matmul_table import HEADER, matmul_rows

    words = ("tokens × out × in", "product", "layout")
    print_table(f"Matmuls in {record['precision']}", HEADER, matmul_rows(record["layers"]), words)
    print(f"{record['machine']}\n{record['file']}")
