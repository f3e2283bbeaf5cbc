"""fourfold calibrate"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import AsJson


def calibrate(
    out: Annotated[Path, typer.Option(metavar="MACHINE.toml", help="The machine file to write.")],
    source: Annotated[
        list[Path], typer.Option("--from", metavar="PATH", help="runs/NAME/metrics.jsonl or a table .csv; repeatable.")
    ] = [],  # noqa: B006 (typer reads it, nobody writes it)
    machine: Annotated[str, typer.Option(help="The machine that is measured, as far as it is known.")] = "laptop",
    processes: Annotated[
        int | None, typer.Option(help="Local processes of the microbenchmark. Default: one for each GPU, else 2.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a machine file for `fourfold plan` from this machine, or from what runs on it took.

    Without --from it measures matmuls, memory, attention, launches and collectives for about a minute; start it with
    srun or torchrun on two nodes or more to measure the network too. With --from it fits the planner's constants to
    measured steps, and says how well rows that were left out are then predicted.

    Example: fourfold calibrate --out mine.toml --from runs/demo/metrics.jsonl
    """
    from fourfold.data.files import write_output
    from fourfold.errors import UserError
    from fourfold.planning.machines.machine import load_machine
    from fourfold.planning.machines.write import machine_toml, measured_machine

    if out.suffix != ".toml":
        raise UserError(f"--out {out} must end in .toml: that is how `fourfold plan --machine` knows a file")
    base = load_machine(machine)
    if source:
        from fourfold.planning.calibration.machine_fit import fit_machine

        fitted = fit_machine(source, base, out.stem)
        text = machine_toml(fitted.machine, f"{base.name}, calibrated on {fitted.rows} rows", base)
        record = {"rows": fitted.rows, "skipped": fitted.skipped, "before": fitted.before, "held_out": fitted.held_out}
    else:
        from fourfold.tuning.start import microbenchmark

        measured = microbenchmark(processes)
        if measured is None:  # not the first process of a launcher's
            return
        text = machine_toml(measured_machine(measured, base, out.stem), f"{measured['device']}, measured", base)
        record = measured
    write_output(out, text)
    if as_json:
        import json

        print(json.dumps({"machine": str(out), **record}))
    elif source:
        print(f"Rows: {record['rows']}. Mean error before: {_percent(record['before'])}; of rows left out of the fit: "
              f"{_percent(record['held_out'])}. Written: {out}")  # fmt: skip
    else:
        print(text, end="")


def _percent(errors: dict[str, float | int | None]) -> str:
    mean = errors["mean_abs_error"]
    return "too few rows to tell" if mean is None else f"{mean:.1%}"
