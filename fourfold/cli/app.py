"""Build the command line from one file per command, and print a user's mistake as one sentence."""

import errno
import os
import reprlib
import sys
from collections.abc import Callable
from typing import NoReturn

import typer
from typer._click import Context
from typer._click.exceptions import ClickException, NoArgsIsHelpError
from typer.core import TyperGroup

from fourfold import __version__
from fourfold.cli.audit import audit
from fourfold.cli.checkpoint import checkpoint
from fourfold.cli.evaluate import evaluate
from fourfold.cli.generate import generate
from fourfold.cli.launch import launch
from fourfold.cli.loki import loki
from fourfold.cli.machine import machine
from fourfold.cli.parity import parity
from fourfold.cli.plan import plan
from fourfold.cli.prepare import prepare
from fourfold.cli.report import report
from fourfold.cli.trace import trace
from fourfold.cli.train import train
from fourfold.cli.tune import tune
from fourfold.cli.usage import check_arguments, usage_sentence
from fourfold.errors import UserError, sentence
from fourfold.exit_codes import CRASH, HANG, REFUSED
from fourfold.launch.local_workers import JobHung, WorkerFailed
from fourfold.processes import lossy_output

PANELS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Plan": {"plan": plan, "trace": trace, "tune": tune},
    "Prepare": {"machine": machine, "prepare": prepare},
    "Train": {"train": train, "launch": launch},
    "Inspect": {"report": report, "parity": parity, "evaluate": evaluate, "audit": audit},
    "Use": {"checkpoint": checkpoint, "generate": generate, "loki": loki},
}
"""The commands, grouped as in the help text. A project usually needs them in this order."""


class InOrder(TyperGroup):
    """A group of commands that the help text lists in the order of ``PANELS``. Without this class, typer would list
    commands with subcommands last."""

    def list_commands(self, ctx: Context) -> list[str]:
        return [name for commands in PANELS.values() for name in commands]


app = typer.Typer(
    cls=InOrder,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train large language models on a four-dimensional grid of devices.",
)
for panel, commands in PANELS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if show:
        print(f"fourfold {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command and exit. After a user's mistake, print one sentence and exit with code 2. If a worker process
    crashes, print its traceback and exit with code 1. If a worker process hangs, exit with code 4.

    If the reader of the output is gone (``| head``), the command finishes silently.
    """
    try:
        try:
            with lossy_output():
                # Some shells set COLUMNS to 0 if there is no terminal, and rich would then print no text. So remove the
                # variable.
                if not os.environ.get("COLUMNS", "").strip(" 0"):
                    os.environ.pop("COLUMNS", None)
                check_arguments(sys.argv[1:])
                code = app(prog_name="fourfold", standalone_mode=False)
                sys.stdout.flush()  # Flush now, so that a full disk is reported as an error.
            sys.exit(code)
        except NoArgsIsHelpError as error:
            error.show()
            sys.exit(REFUSED)
        except ClickException as error:
            raise UserError(usage_sentence(error)) from None
    except typer.Abort:
        sys.exit(CRASH)
    except UserError as error:
        _end(f"fourfold: {sentence(error)}", REFUSED)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            problem = f"{reprlib.repr(error.filename)} is too long for the name of a file"
        elif isinstance(error, PermissionError) and error.filename is not None:
            problem = f"cannot open {error.filename}: {error.strerror}"
        elif error.errno == errno.EMFILE:
            problem = "this process cannot open more files; raise the limit, for example with: ulimit -n 4096"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            problem = f"cannot write {error.filename or 'the output'}: {error.strerror}"
        else:
            raise
        _end(f"fourfold: {problem}", REFUSED)
    except JobHung as error:
        _end(f"fourfold: {error}", HANG)
    except WorkerFailed as error:
        _end(str(error), CRASH)


def _end(message: str, code: int) -> NoReturn:
    """Print a message to standard error and exit with ``code``. Output that cannot be written is discarded."""
    with lossy_output(any_error=True):
        print(message, file=sys.stderr)
    sys.exit(code)
