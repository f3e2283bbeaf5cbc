"""fourfold checkpoint export-hf"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import AsJson, StoredDtype, show
from fourfold.data.progress import working
from fourfold.huggingface.architectures.families import FAMILIES


def export_hf(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run's folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    dtype: Annotated[
        StoredDtype,
        typer.Option(help="Type of the weights. auto is the original model's type, or otherwise the stored type."),
    ] = "auto",
    model_type: Annotated[
        str | None,
        typer.Option(
            metavar="FAMILY",
            help="Write the model as this family, if the family computes the same (for example mistral for a "
            f"Llama without biases): one of {', '.join(FAMILIES)}.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="A tokenizer.json. Default: the original's, or the corpus's.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="LoRA: write the merged model, not the adapter.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="Write the moving average of [ema], not the weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of any grid as a folder that transformers opens.

    The folder has config.json, generation_config.json, and the tokenizer. One tensor is in memory at a time. A run with
    LoRA becomes an adapter that peft opens.
    """
    from fourfold.data.transformers_tokenizer import NO_CORPORA
    from fourfold.huggingface.export_model import export_huggingface
    from fourfold.reports.terminal import print_transferred

    with working("Writing the model"):
        transferred = export_huggingface(checkpoint, out, dtype, model_type, tokenizer, merge, averaged=ema)
    show(transferred.record(), as_json, print_transferred)
    if not transferred.has_tokenizer:
        typer.echo(
            f"warning: {out} has no tokenizer: {NO_CORPORA}; export from there, or give --tokenizer PATH", err=True
        )
