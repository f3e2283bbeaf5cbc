"""fourfold plan: layouts, validation, scaling"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from fourfold.cli.options import AsJson, Overrides


class LayoutUnlessNamed(TyperGroup):
    """``fourfold plan …`` is ``fourfold plan layout …`` unless another command is named."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["layout", *args]
        return super().parse_args(ctx, args)


plan = typer.Typer(
    cls=LayoutUnlessNamed,
    no_args_is_help=True,
    help="Find the fastest layout of a model on a machine, and say why: memory, seconds, days. "
    "`fourfold plan --model …` is short for `fourfold plan layout --model …`.",
)

Model = Annotated[str | None, typer.Option(help="A preset, a Hugging Face config.json, or the folder of one.")]
MachineName = Annotated[str, typer.Option(help="A machine that fourfold knows, or the path of a .toml.")]
Seq = Annotated[int | None, typer.Option(help="Tokens of a sequence. Default: the model's, at most 8192.")]
Batch = Annotated[
    int | None, typer.Option("--global-batch", help="Sequences of a step. Default: about 4M tokens, one a GPU or more.")
]
Precision = Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp8.")]
Limit = Annotated[
    list[str], typer.Option("--limit", metavar="AXIS=N|AXIS<=N", help="x<=8, pp=1, zero=0, recompute=full; repeatable.")
]


@plan.command()
def layout(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="Predict this run, and replan it.", show_default=False)
    ] = None,
    model: Model = None,
    machine: MachineName = "dgx-h100",
    gpus: Annotated[int | None, typer.Option(help="How many GPUs. Default: those of the run file.")] = None,
    seq: Seq = None,
    global_batch: Batch = None,
    tokens: Annotated[float | None, typer.Option(help="Tokens of the whole training, for days and costs.")] = None,
    precision: Precision = None,
    top: Annotated[int, typer.Option(min=1, help="How many layouts to show.")] = 10,
    as_json: AsJson = False,
    explain: Annotated[bool, typer.Option("--explain", help="Why the best wins, and what would change that.")] = False,
    write: Annotated[Path | None, typer.Option(metavar="RUN.toml", help="Write the best as a run file.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="plan.html", help="Write it all as one page.")] = None,
    limits: Limit = [],  # noqa: B006 (typer reads it, nobody writes it)
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Rank every legal layout of a model on a machine by predicted step time.

    Example: fourfold plan --model llama3-70b --machine dgx-h100 --gpus 512 --tokens 2e12 --explain
    """
    from rich.console import Console

    from fourfold.planning.plan_record import answer
    from fourfold.planning.request import request, write_run

    asked = request(model, run_file, overrides, gpus, seq, global_batch, precision)
    with Console(stderr=True).status("Every layout is looked at"):  # seconds, or a minute for 100,000 GPUs
        told = answer(asked, machine, limits, top, tokens, explain or report is not None, report is not None)
    if write is not None:
        write_run(write, asked, told.plan.best)
    if report is not None:
        from fourfold.reports.plan_report import write_plan_report

        write_plan_report(report, told)
    if as_json:
        import json

        print(json.dumps(told.record()))
    else:
        from fourfold.reports.plan_terminal import plan_tables

        plan_tables(told, explain)


@plan.command()
def validate(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.csv]", help="Measured rows; none: published figures.", show_default=False),
    ] = None,
    calibrate_on: Annotated[
        list[Path], typer.Option("--calibrate-on", metavar="CSV", help="Fit the constants to these rows; repeatable.")
    ] = [],  # noqa: B006
    machine_only: Annotated[
        bool, typer.Option("--machine-only", help="No calibrated constant at all: machine files and priors.")
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print every row.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with measured step times and memory.

    Example: fourfold plan validate rows.csv --calibrate-on others.csv
    """
    from fourfold.planning.calibration.comparison import validate as compare
    from fourfold.reports.plan_terminal import validation_tables

    result = compare(file, calibrate_on, machine_only)
    if as_json:
        import json

        print(json.dumps(result.record(rows)))
    else:
        validation_tables(result, rows)


@plan.command()
def scaling(
    model: Annotated[str, typer.Option(help="A preset, a Hugging Face config.json, or the folder of one.")],
    machine: MachineName = "dgx-h100",
    gpus: Annotated[
        str, typer.Option(metavar="FROM:TO", help="512:32768 doubles from size to size; or 512,768.")
    ] = "8:512",
    seq: Seq = None,
    global_batch: Batch = None,
    precision: Precision = None,
    weak: Annotated[bool, typer.Option("--weak/--strong", help="The batch grows with the GPUs, or stays.")] = True,
    as_json: AsJson = False,
    report: Annotated[Path | None, typer.Option(metavar="scaling.html", help="Write the curve as a page.")] = None,
    limits: Limit = [],  # noqa: B006
) -> None:
    """Replan a model at growing numbers of GPUs.

    Example: fourfold plan scaling --model gpt-80b --machine frontier --gpus 512:8192 --strong
    """
    from fourfold.planning.machines.machine import load_machine
    from fourfold.planning.request import constants_for, limits_of, request
    from fourfold.planning.scaling import scaling as scale
    from fourfold.planning.scaling import sizes_of

    sizes, where = sizes_of(gpus), load_machine(machine)
    asked = request(model, None, [], sizes[0], seq, global_batch, precision)
    points = scale(asked.base, where, constants_for(where), sizes, weak, limits_of(limits), asked.name)
    if report is not None:
        from fourfold.reports.plan_report import write_scaling_report

        write_scaling_report(report, points, asked.name, where.name, weak)
    if as_json:
        import json

        print(json.dumps({"model": asked.name, "machine": where.name, "weak": weak,
                          "points": [point.record() for point in points]}))  # fmt: skip
    else:
        from fourfold.reports.plan_terminal import scaling_table

        scaling_table(points, weak)
