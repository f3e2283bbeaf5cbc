"""fourfold machine calibrate"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fourfold.cli.options import MACHINES, AsJson, show
from fourfold.data.progress import working
from fourfold.errors import UserError, given_as


def calibrate(
    out: Annotated[Path, typer.Option(metavar="MACHINE.toml", help="The machine file to write.")],
    source: Annotated[
        list[Path],
        typer.Option("--from", metavar="PATH", help="runs/NAME/metrics.jsonl, or a table of rows (.csv). Repeatable."),
    ] = [],  # noqa: B006 (typer only reads it)
    machine: Annotated[
        str,
        typer.Option(
            help=f"The machine to start from. Keep its values for everything that is not measured. {MACHINES}"
        ),
    ] = "laptop",
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, max=256, help="Local processes of the microbenchmark. Default: one per GPU, or 2 without GPUs."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a machine file for `fourfold plan` from measurements.

    Without --from, measure this machine's matmuls, memory, attention, launches, and collectives for about a minute.
    Start the command with srun or torchrun on two or more nodes to measure the network too. With --from, fit the
    planner's constants to measured steps, and print the error on rows that were held out of the fit.

    Example: fourfold machine calibrate --out mine.toml --from runs/demo/metrics.jsonl
    """
    from fourfold.data.files import check_writable, write_output
    from fourfold.planning.machines.machine import load_machine
    from fourfold.planning.machines.write import machine_toml, measured_machine

    if out.suffix != ".toml":
        raise UserError(f"--out {out} must end in .toml, such as {out}.toml, or --machine would not take it as a file")
    check_writable(out, "--out", "mine.toml")
    base = load_machine(machine)
    record: dict[str, Any]
    if source:
        from fourfold.planning.calibration.machine_fit import fit_machine

        with working("Fitting the constants"), given_as("--from"):
            fitted = fit_machine(source, base, out.stem)
        text = machine_toml(fitted.machine, f"{base.name}, calibrated on {fitted.rows} rows", base)
        record = {"rows": fitted.rows, "skipped": fitted.skipped, "before": fitted.before, "held_out": fitted.held_out}
        printed = (f"Rows: {fitted.rows}. Mean error before the fit: {_mean_error(fitted.before)}; on held-out rows: "
                   f"{_mean_error(fitted.held_out)}. Written: {out}")  # fmt: skip
    else:
        from fourfold.tuning.start import microbenchmark

        with working("Measuring this machine"):
            measured = microbenchmark(processes)
        if measured is None:  # Only the first process has a result and writes the file.
            return
        record = measured
        printed = text = machine_toml(measured_machine(record, base, out.stem), f"{record['device']}, measured", base)
    with given_as("--out"):
        write_output(out, text)
    show({"machine": str(out), **record}, as_json, lambda _: print(printed.rstrip("\n")))


def _mean_error(errors: dict[str, float | int | None]) -> str:
    mean = errors["mean_abs_error"]
    return "unknown (too few rows)" if mean is None else f"{mean:.1%}"
