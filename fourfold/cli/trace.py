"""`fourfold trace`: show the memory and communication of one training step."""

from typing import Annotated

from typer import Option

from fourfold.cli.options import MACHINES, AsJson, Overrides, RunFile, show
from fourfold.data.progress import working


def trace(
    run_file: RunFile,
    as_json: AsJson = False,
    machine: Annotated[
        str | None, Option(metavar="NAME|FILE.toml", help=f"Print seconds too, on this machine. {MACHINES}")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer only reads it)
) -> None:
    """Show how much memory one rank needs in a training step, and what it communicates. Any grid can be traced in one
    process on this machine.

    Runs the real step without data. The bytes of a collective are the size of its full tensor: the output of a gather,
    or the input of a reduction. If you name a machine, the planner also gives the seconds that each collective takes
    alone, and the exposed seconds that no concurrent matmul hides.
    """
    from fourfold.planning.machines.machine import load_machine
    from fourfold.run_file.load import load_run

    run = load_run(run_file, overrides)
    where = None if machine is None else load_machine(machine)
    from fourfold.reports.terminal import trace_tables

    # Import torch only after the run file is checked, because the import takes seconds.
    from fourfold.verification.trace import trace as trace_run

    with working("Tracing one rank's step"):
        report = trace_run(run, machine=where)
    show(report.record(), as_json, lambda _: trace_tables(report))
