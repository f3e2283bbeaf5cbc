"""`fourfold report`: the page of one run."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, finished or still training: runs/NAME.")
    ],
) -> None:
    """Write RUN_DIR/report.html: curves, facts, run file and sample on one page that needs no network."""
    from fourfold.reports.run_report import write_run_report

    typer.echo(write_run_report(run_dir))
