"""fourfold trace"""

from __future__ import annotations

from typing import Annotated

import typer

from fourfold.cli.options import MACHINES, AsJson, Overrides, RunFile, complete_machine, show
from fourfold.cli.working import working


def trace(
    run_file: RunFile,
    as_json: AsJson = False,
    whole: Annotated[
        bool, typer.Option(help="Run every layer and micro-batch instead of continuing from a few (slow).")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.toml",
            help=f"Print seconds too, on this machine. {MACHINES}",
            autocompletion=complete_machine,
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer reads it, nobody writes it)
) -> None:
    """Show what one rank holds and sends in a training step, at any number of processes, on this machine.

    The real step runs in one process without data. The bytes of a collective are the size of its full tensor: after a
    gather, or before a reduction. With a machine, the planner's terms give seconds: each collective alone, and exposed,
    if the matmuls that run concurrently take less time.
    """
    from fourfold.planning.machines.machine import load_machine
    from fourfold.run_file.load import load_run

    run = load_run(run_file, overrides)
    where = None if machine is None else load_machine(machine)
    from fourfold.reports.terminal import trace_tables
    from fourfold.verification.trace import trace as trace_run  # brings torch, which no mistake should wait for

    with working("Tracing one rank's step"):
        report = trace_run(run, whole, where)
    show(report.record(), as_json, lambda _: trace_tables(report))
