"""`fourfold plan`: rank layouts, validate predictions, and show how a model scales."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option, Typer
from typer.models import OptionInfo

from fourfold.cli.options import KNOBS, MACHINES, AsJson, Overrides, show
from fourfold.cli.usage import FirstUnlessNamed
from fourfold.config.presets import PRESETS
from fourfold.data.progress import working
from fourfold.errors import UserError, given_as

if TYPE_CHECKING:
    from fourfold.planning.request import Request


plan = Typer(
    cls=FirstUnlessNamed,
    no_args_is_help=True,
    help="Find the fastest layout of a model on a machine, and explain it: memory, seconds per step, days. "
    "`fourfold plan --model …` is short for `fourfold plan layout --model …`.",
)

MODEL_HELP = f"A Hugging Face config.json, its folder, or a preset: {', '.join(PRESETS)}."
FROM_HELP = (
    "Plan a run of another program: a configuration of Megatron-LM, torchtitan, nanotron, or Hugging Face's Trainer."
)
MEASURED_HELP = "With --from: measured seconds per step. The planner fits its constants to this time."
RUN_HELP = "Predict this run file's own layout, and search for faster ones."
EXPLAIN_HELP = "Show where a step's time goes, and how the time changes if you change one choice."
ROWS_HELP = "A table of measured rows. Default: the published rows that come with fourfold."
LEAVE_HELP = "Leave each row's source (or machine) out of the fit, and then predict the row. This takes minutes."
SIZES_HELP = "Numbers of GPUs: a list (512,768), or doublings (512:32768)."
LeaveOut = Annotated[Literal["source", "machine"] | None, Option(help=LEAVE_HELP, show_default=False)]
OwnRun = Annotated[Path | None, Argument(metavar="[RUN.toml]", help=RUN_HELP, show_default=False)]
TOKENS_HELP = "Tokens to train on. Needed for days, costs, and the steps of --write."
Tokens = Annotated[float | None, Option(help=TOKENS_HELP)]
Explain = Annotated[bool, Option("--explain", help=EXPLAIN_HELP)]
Model = Annotated[str | None, Option(help=MODEL_HELP)]
MachineName = Annotated[str, Option(help=MACHINES)]
Seq = Annotated[int | None, Option(help="Tokens per sequence. Default: the model's context, at most 8192.")]
Batch = Annotated[
    int | None,
    Option("--global-batch", help="Sequences per step. Default: about 4M tokens, at least one per GPU."),
]


def _one_of(names: str, default: str) -> OptionInfo:
    """Define an option with a few possible values, which ``names`` lists, separated by ``|``. The help text says that
    the default is the run file's value, or ``default`` without a run file."""
    option: OptionInfo = Option(metavar=names, help=f"Default: the run file's, or {default}.")
    return option


Precision = Annotated[str | None, _one_of("bf16|fp16|fp32|fp8", "bf16")]
Optimizer = Annotated[str | None, _one_of("adamw|muon|lion", "adamw")]
Limit = Annotated[
    list[str],
    Option(
        "--limit",
        metavar="NAME=VALUE|AXIS<=N",
        help=f"Search fewer layouts, such as pp=1, x<=8 or recompute=full; repeatable. {KNOBS}",
    ),
]


@plan.command()
def layout(
    run_file: OwnRun = None,
    model: Model = None,
    machine: Annotated[str | None, Option(help=f"{MACHINES} Default: dgx-h100. Needed with --from.")] = None,
    gpus: Annotated[int | None, Option(help="Number of GPUs to plan for. Default: the run file's.")] = None,
    other: Annotated[Path | None, Option("--from", metavar="FILE", help=FROM_HELP)] = None,
    measured: Annotated[float | None, Option(min=1e-6, help=MEASURED_HELP)] = None,
    seq: Seq = None,
    global_batch: Batch = None,
    tokens: Tokens = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    top: Annotated[int, Option(min=1, help="How many layouts to show.")] = 10,
    as_json: AsJson = False,
    explain: Explain = False,
    write: Annotated[Path | None, Option(metavar="RUN.toml", help="Write the best layout as a run file.")] = None,
    report: Annotated[Path | None, Option(metavar="plan.html", help="Write the plan as an HTML page.")] = None,
    limits: Limit = [],  # noqa: B006 (typer only reads it)
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Rank every legal layout of a model on a machine by predicted step time.

    Example: fourfold plan --model llama3-70b --machine dgx-h100 --gpus 512 --tokens 2e12 --explain
    """
    from fourfold.planning.plan_record import plan_request
    from fourfold.planning.planned_run import write_run
    from fourfold.planning.request import request_from_options, request_from_other
    from fourfold.reports.plan_terminal import plan_tables

    if (measured is not None and other is None) or (other is not None and (run_file is not None or overrides)):
        raise UserError("--measured needs --from FILE, and --from takes neither a run file nor --set")
    given = {"machine": machine, "gpus": gpus, "seq_len": seq, "global_batch": global_batch,
             "precision": precision, "optimizer": optimizer, "step_seconds": measured}  # fmt: skip
    options = (model, run_file, overrides, gpus, seq, global_batch, precision, optimizer)
    request = request_from_options(*options) if other is None else request_from_other(other, model, given)
    _print_note(request)
    with working("Searching layouts") as watch:  # The search takes seconds, or longer for 100,000 GPUs.
        explained = explain or report is not None
        result = plan_request(request, machine or "dgx-h100", limits, top, tokens, explained, watch)
    if write is not None:
        with given_as("--write"):
            write_run(write, request, result.plan.best, tokens)
    if report is not None:
        from fourfold.reports.plan_report import write_plan_report

        with given_as("--report"):
            write_plan_report(report, result)
    show(result.record(), as_json, lambda _: plan_tables(result, explain))


@plan.command()
def validate(
    file: Annotated[Path | None, Argument(metavar="[FILE.csv]", help=ROWS_HELP, show_default=False)] = None,
    calibrate_on: Annotated[
        list[Path],
        Option("--calibrate-on", metavar="CSV", help="Fit the constants to these rows first. Repeatable."),
    ] = [],  # noqa: B006
    leave_out: LeaveOut = None,
    rows: Annotated[bool, Option("--rows", help="Print every row.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with measured step times and memory.

    Example: fourfold plan validate rows.csv --calibrate-on others.csv
    """
    from fourfold.planning.calibration.rows import measured_table
    from fourfold.planning.calibration.validation import validate as compare
    from fourfold.reports.plan_terminal import validation_tables

    with working("Predicting the rows"):
        result = compare(file or measured_table(), calibrate_on, leave_out)
    show(result.record(rows), as_json, lambda _: validation_tables(result, rows))


@plan.command()
def scaling(
    model: Annotated[str, Option(help=MODEL_HELP)],
    machine: MachineName = "dgx-h100",
    gpus: Annotated[str, Option(metavar="FROM:TO|N,N", help=SIZES_HELP)] = "8:512",
    seq: Seq = None,
    global_batch: Batch = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    weak: Annotated[
        bool, Option("--weak/--strong", help="Grow the batch with the number of GPUs, or keep it fixed.")
    ] = True,
    as_json: AsJson = False,
    limits: Limit = [],  # noqa: B006
) -> None:
    """Plan a model at several numbers of GPUs, to see how it scales.

    Example: fourfold plan scaling --model gpt-80b --machine frontier --gpus 512:8192 --strong
    """
    from fourfold.planning.calibration.machine_constants import constants_for
    from fourfold.planning.machines.machine import load_machine
    from fourfold.planning.request import request_from_options
    from fourfold.planning.scaling import scaling_curve, sizes_of
    from fourfold.planning.search.limits import parse_limits
    from fourfold.reports.plan_terminal import scaling_table

    sizes, where = sizes_of(gpus), load_machine(machine)
    request = request_from_options(model, None, [], sizes[0], seq, global_batch, precision, optimizer)
    _print_note(request)
    with working("Planning each size") as watch:
        points = scaling_curve(request.base, where, constants_for(where), sizes, weak, parse_limits(limits), watch)
    record = {
        "model": request.name,
        "machine": where.name,
        "weak": weak,
        "points": [point.record() for point in points],
    }
    show(record, as_json, lambda _: scaling_table(points, weak))


def _print_note(request: Request) -> None:
    """Print the request's note about the model, if there is one, to standard error."""
    if request.note is not None:
        print(f"note: {request.note}", file=sys.stderr)
