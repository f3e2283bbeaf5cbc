"""fourfold checkpoint"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.export_hf import export_hf
from fourfold.cli.import_hf import import_hf
from fourfold.data.progress import working

checkpoint = typer.Typer(no_args_is_help=True, help="Check checkpoints, and convert them from and to Hugging Face.")
checkpoint.command("import-hf")(import_hf)
checkpoint.command("export-hf")(export_hf)


@checkpoint.command()
def verify(folder: Annotated[Path, typer.Argument(help="A checkpoint, a folder of them, or a run's folder.")]) -> None:
    """Check that the files of checkpoints are unchanged since they were written. Exit code 1 if one is damaged."""
    from fourfold.checkpoints.find import STATE_FILE, checkpoints_at
    from fourfold.checkpoints.integrity import size_of
    from fourfold.checkpoints.verify import verify
    from fourfold.errors import UserError, sentence
    from fourfold.training.console import format_bytes

    found = checkpoints_at(folder)
    if not found:
        raise UserError(f"{folder} is not a checkpoint (a folder with {STATE_FILE}), nor has one; give a run's folder")
    damaged = 0
    for path in found:
        try:
            with working(f"Reading {path}"):
                verify(path)
            files, size = size_of(path)
        except UserError as damage:
            if not path.exists():  # The run has removed this checkpoint since it was listed.
                continue
            damaged += 1
            typer.echo(sentence(damage))
        else:
            typer.echo(f"{path} is whole: {files} files, {format_bytes(size)}")
    if damaged:
        raise typer.Exit(1)
