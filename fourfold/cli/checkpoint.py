"""`fourfold checkpoint`: verify, import, and export checkpoints."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, Typer, echo

from fourfold.cli.options import AsJson, StoredDtype, show
from fourfold.data.progress import working
from fourfold.huggingface.architectures.families import FAMILIES

checkpoint = Typer(no_args_is_help=True, help="Check checkpoints, and convert them from and to Hugging Face.")


@checkpoint.command()
def verify(folder: Annotated[Path, Argument(help="A checkpoint, a folder of checkpoints, or a run's folder.")]) -> None:
    """Check that the files of checkpoints are unchanged since they were written. The exit code is 1 if a checkpoint is
    damaged."""
    from fourfold.checkpoints.find_checkpoints import STATE_FILE, checkpoints_at
    from fourfold.checkpoints.integrity import size_of
    from fourfold.checkpoints.verify import verify
    from fourfold.errors import UserError, sentence
    from fourfold.training.console import format_bytes

    found = checkpoints_at(folder)
    if not found:
        raise UserError(
            f"{folder} is not a checkpoint (a folder with {STATE_FILE}) and contains no checkpoint; give a run's folder"
        )
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
            echo(sentence(damage))
        else:
            echo(f"{path} is undamaged: {files} files, {format_bytes(size)}")
    if damaged:
        raise Exit(1)


@checkpoint.command("import-hf")
def import_hf(
    model: Annotated[str, Argument(metavar="DIR", help="Folder of a Hugging Face model, or its id on the Hub.")],
    out: Annotated[Path, Argument(metavar="OUT", help="The checkpoint to write.")],
    as_json: AsJson = False,
) -> None:
    """Convert a Hugging Face model to a checkpoint that any grid can read.

    Weights keep their dtype, and only one tensor is in memory at a time. To start a run from the checkpoint, set
    checkpoint.resume to its path. A run can also start from the Hugging Face model itself, with model.from_hf.
    """
    from fourfold.huggingface.import_model import import_huggingface
    from fourfold.reports.terminal import print_transferred

    with working("Writing the checkpoint"):
        transferred = import_huggingface(model, out)
    show(transferred.record(), as_json, print_transferred)


@checkpoint.command("export-hf")
def export_hf(
    checkpoint: Annotated[Path, Argument(metavar="CHECKPOINT", help="A checkpoint, or a run's folder.")],
    out: Annotated[Path, Argument(metavar="OUT", help="The folder to write.")],
    dtype: Annotated[
        StoredDtype,
        Option(
            help="Dtype of the weights. auto: the dtype of the original Hugging Face model, or else of the checkpoint."
        ),
    ] = "auto",
    model_type: Annotated[
        str | None,
        Option(
            metavar="FAMILY",
            help="Write the model as this family, if the family computes the same (for example mistral for a "
            f"Llama without biases): one of {', '.join(FAMILIES)}.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        Option(
            metavar="PATH",
            help="A tokenizer.json. Default: the tokenizer of the original model, or else of the corpus.",
        ),
    ] = None,
    merge: Annotated[bool, Option("--merge", help="LoRA: write the merged model, not the adapter.")] = False,
    ema: Annotated[bool, Option("--ema", help="Write the moving average of [ema], not the weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint of any grid to a folder that transformers can open.

    The folder has config.json, generation_config.json, and the tokenizer. One tensor is in memory at a time. For a run
    with LoRA, the folder has an adapter that peft can open.
    """
    from fourfold.data.transformers_tokenizer import NO_CORPORA
    from fourfold.huggingface.export_model import export_huggingface
    from fourfold.reports.terminal import print_transferred

    with working("Writing the model"):
        transferred = export_huggingface(checkpoint, out, dtype, model_type, tokenizer, merge, averaged=ema)
    show(transferred.record(), as_json, print_transferred)
    if not transferred.has_tokenizer:
        echo(f"warning: {out} has no tokenizer: {NO_CORPORA}; export from there, or give --tokenizer PATH", err=True)
