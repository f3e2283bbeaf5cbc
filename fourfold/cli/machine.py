"""fourfold machine: examine a machine, and measure it, before you start a run"""

from __future__ import annotations

import typer

from fourfold.cli.calibrate import calibrate
from fourfold.cli.doctor import doctor
from fourfold.cli.tune_matmul import tune_matmul

machine = typer.Typer(no_args_is_help=True, help="Examine this machine before a run, and measure it.")
machine.command()(doctor)
machine.command()(calibrate)
machine.command("tune-matmul")(tune_matmul)
