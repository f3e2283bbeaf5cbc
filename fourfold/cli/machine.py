"""`fourfold machine`: check this machine, and measure it, before you start a run."""

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Exit, Option, Typer

from fourfold.cli.options import MACHINES, AsJson, Overrides, RunFile, show
from fourfold.data.progress import working
from fourfold.errors import UserError, given_as

machine = Typer(no_args_is_help=True, help="Examine this machine before a run, and measure it.")


@machine.command()
def doctor(
    as_json: AsJson = False,
) -> None:
    """Check this machine before a run: versions, devices, and shared memory. Also run an all-reduce.

    Each finding is one line: ok, a warning, or an error, and what to do about it. The exit code is 1 if there is an
    error. The check takes a minute or two. Under srun or torchrun, the all-reduce includes all processes. The first
    machine shows every finding, and the remaining machines show only warnings and errors. With --json, every machine
    prints one line.
    """
    from fourfold.doctor.examine import examine
    from fourfold.environment import read_environment
    from fourfold.reports.findings import show_finding, summary

    place, host = read_environment(os.environ), socket.gethostname()
    is_first = place is None or place.rank == 0
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json and (is_first or finding.level != "ok"):
            show_finding(finding, None if is_first else host)
    failed = any(finding.level == "error" for finding in findings)
    if as_json and findings:
        print(json.dumps({"ok": not failed, "host": host, "findings": [asdict(finding) for finding in findings]}))
    elif is_first:
        print(summary([finding.level for finding in findings]))
    if failed:
        raise Exit(1)


@machine.command()
def calibrate(
    out: Annotated[Path, Option(metavar="MACHINE.toml", help="The machine file to write.")],
    source: Annotated[
        list[Path],
        Option("--from", metavar="PATH", help="runs/NAME/metrics.jsonl, or a table of rows (.csv). Repeatable."),
    ] = [],  # noqa: B006 (typer only reads it)
    machine: Annotated[
        str, Option(help=f"Copy the values that are not measured from this machine. {MACHINES}")
    ] = "laptop",
    processes: Annotated[
        int | None,
        Option(min=1, max=256, help="Local processes of the microbenchmark. Default: one per GPU, or 2 without GPUs."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a machine file for `fourfold plan` from measurements.

    Without --from, measure this machine's matmuls, memory, attention, launches, and collectives for about a minute.
    Start the command with srun or torchrun on two or more nodes to measure the network too. With --from, fit the
    planner's constants to measured steps, and print the error on rows that were held out of the fit.

    Example: fourfold machine calibrate --out mine.toml --from runs/demo/metrics.jsonl
    """
    from fourfold.data.atomic_files import check_writable, write_output
    from fourfold.planning.machines.machine import load_machine
    from fourfold.planning.machines.write import machine_toml, measured_machine

    if out.suffix != ".toml":
        raise UserError(f"--out {out} must end in .toml, such as {out}.toml; --machine takes no other files")
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
        from fourfold.tuning.microbenchmark import microbenchmark

        with working("Measuring this machine"):
            measured = microbenchmark(processes)
        if measured is None:  # Only the first process has a result and writes the file.
            return
        record = measured
        printed = text = machine_toml(measured_machine(record, base, out.stem), f"{record['device']}, measured", base)
    with given_as("--out"):
        write_output(out, text)
    show({"machine": str(out), **record}, as_json, lambda _: print(printed.rstrip("\n")))


@machine.command("tune-matmul")
def tune_matmul(
    run_file: RunFile,
    again: Annotated[
        bool, Option("--again", help="Also measure sizes that are already in this machine's table.")
    ] = False,
    as_json: AsJson = False,
    overrides: Overrides = [],  # noqa: B006 (typer only reads it)
) -> None:
    """Find the fastest memory layouts for the run file's matmuls on this machine.

    Each linear layer of a block has three matmuls: output, input gradient, and weight gradient. This command times them
    with the shapes of one rank: in the default layout, with transposed operands, and with padded rows. If a layout is
    faster than the default by more than the noise, it is saved to a table in your cache directory. Runs with
    training.tuned_products = 'cached' or 'measured' use this table.
    """
    from fourfold.run_file.load import load_run

    run = load_run(run_file, overrides)
    # Import torch only after the run file is checked, because the import takes seconds.
    from fourfold.matmul_tuning.matmul_choice import tune_matmuls
    from fourfold.reports.tuned_matmul_table import print_matmuls

    with working("Timing the matmuls"):
        record = tune_matmuls(run, again)
    show(record, as_json, print_matmuls)


def _mean_error(errors: dict[str, float | int | None]) -> str:
    mean = errors["mean_abs_error"]
    return "unknown (too few rows)" if mean is None else f"{mean:.1%}"
