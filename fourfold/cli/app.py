"""The command line: one file per command; a user's mistake is printed as one sentence."""

from __future__ import annotations

import errno
import reprlib
import sys

import typer

from fourfold import __version__
from fourfold.cli.audit import audit
from fourfold.cli.calibrate import calibrate
from fourfold.cli.checkpoint import checkpoint
from fourfold.cli.doctor import doctor
from fourfold.cli.evaluate import evaluate
from fourfold.cli.export_hf import export_hf
from fourfold.cli.generate import generate
from fourfold.cli.import_hf import import_hf
from fourfold.cli.launch import launch
from fourfold.cli.loki import loki
from fourfold.cli.masks import masks
from fourfold.cli.parity import parity
from fourfold.cli.plan import plan
from fourfold.cli.prepare import prepare
from fourfold.cli.report import report
from fourfold.cli.serve import serve
from fourfold.cli.trace import trace
from fourfold.cli.train import train
from fourfold.cli.tune import tune
from fourfold.cli.tune_matmul import tune_matmul
from fourfold.errors import UserError, sentence
from fourfold.exit_codes import CRASH, HANG, REFUSED
from fourfold.launch.local_workers import JobHung, WorkerFailed

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Train large language models on a four-dimensional grid of devices.",
)
for command in (
    train,
    prepare,
    parity,
    trace,
    report,
    masks,
    audit,
    evaluate,
    calibrate,
    tune_matmul,
    tune,
    import_hf,
    export_hf,
    generate,
    serve,
    doctor,
):
    app.command()(command)
app.add_typer(plan, name="plan")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(launch, name="launch")
app.add_typer(loki, name="loki")


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if show:
        print(f"fourfold {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command. A user's mistake exits with 2 and one sentence, a worker's crash with 1 and its traceback."""
    try:
        app(prog_name="fourfold")
    except UserError as error:
        print(f"fourfold: {sentence(error)}", file=sys.stderr)
        sys.exit(REFUSED)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            problem = f"{reprlib.repr(error.filename)} is too long for the name of a file"
        elif isinstance(error, PermissionError) and error.filename is not None:
            problem = f"cannot open {error.filename}: {error.strerror}"
        else:
            raise
        print(f"fourfold: {problem}", file=sys.stderr)
        sys.exit(REFUSED)
    except JobHung as error:
        print(f"fourfold: {error}", file=sys.stderr)
        sys.exit(HANG)
    except WorkerFailed as error:
        print(error, file=sys.stderr)
        sys.exit(CRASH)
