"""Write a report of one run, or a page that compares several runs, with `fourfold report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo


def report(
    run_dirs: Annotated[
        list[Path], Argument(metavar="RUN_DIR...", help="Folders of runs, finished or still training: runs/NAME.")
    ],
    out: Annotated[
        Path | None,
        Option(metavar="PAGE.html", help="Page of several runs. Default: comparison.html in the first folder."),
    ] = None,
) -> None:
    """Write RUN_DIR/report.html: one page with curves, facts, run file, and sample. The page needs no network.

    For several runs, write one page that overlays their curves and lists the differences between their run files.

    Example: fourfold report runs/adamw runs/muon --out muon.html
    """
    from fourfold.errors import UserError
    from fourfold.reports.run_report import write_comparison, write_run_report

    if len(run_dirs) == 1:
        if out is not None:
            raise UserError(
                f"--out {out} is for the page of several runs; leave --out out to write {run_dirs[0]}/report.html"
            )
        echo(write_run_report(run_dirs[0]))
        return
    page = out or run_dirs[0] / "comparison.html"
    write_comparison(run_dirs, page)
    echo(page)
