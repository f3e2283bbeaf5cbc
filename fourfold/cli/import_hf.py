"""fourfold checkpoint import-hf"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import AsJson, show
from fourfold.data.progress import working


def import_hf(
    model: Annotated[str, typer.Argument(metavar="DIR", help="Folder of a Hugging Face model, or its id on the Hub.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint to write.")],
    as_json: AsJson = False,
) -> None:
    """Write a Hugging Face model as a checkpoint that any grid reads.

    Weights keep their dtype, and only one tensor is in memory at a time. Name the result in checkpoint.resume to start
    a run from it. Starting from model.from_hf needs no import.
    """
    from fourfold.huggingface.import_model import import_huggingface
    from fourfold.reports.terminal import print_transferred

    with working("Writing the checkpoint"):
        transferred = import_huggingface(model, out)
    show(transferred.record(), as_json, print_transferred)
