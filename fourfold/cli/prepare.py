"""`fourfold prepare`: turn text into a tokenized corpus on disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Context, Option, echo
from typer._click.core import ParameterSource

from fourfold.errors import UserError
from fourfold.reports.numbers import counted

if TYPE_CHECKING:
    from fourfold.data.prepare import PrepareSummary


_of_text = partial(Option, rich_help_panel="Options of --format text")
"""Call this in place of ``Option`` to define an option that applies only to --format text."""

CANARY_OPTIONS = ("repeats", "canary_tokens", "canary_noise", "canary_shift", "canaries_from")
TEXT_OPTIONS = ("train_tokenizer", "canaries", *CANARY_OPTIONS, "workers", "text_key", "force")
CONVERSATION_OPTIONS = ("chat_template", "ignore_key")


def prepare(
    command_line: Context,
    inputs: Annotated[
        list[str],
        Argument(
            metavar="INPUTS...",
            help="Files (.txt, .txt.gz, .jsonl, .jsonl.gz, .parquet), folders or globs of them, python-stdlib, or "
            "hf:NAME[:CONFIG][:SPLIT].",
            show_default=False,
        ),
    ],
    out: Annotated[Path, Option(help="Prefix of the files to write: OUT.bin, OUT.idx, OUT.json.")],
    tokenizer: Annotated[
        str | None, Option(metavar="PATH|bytes", help="A tokenizer.json, a folder with one, or bytes.")
    ] = None,
    train_tokenizer: Annotated[
        int | None, _of_text(metavar="VOCAB", help="Train a byte-level BPE tokenizer of this size on the input.")
    ] = None,
    format: Annotated[
        Literal["text", "sft", "preferences"],
        Option(
            help="sft: conversations (messages, ShareGPT, Alpaca, prompt and completion). preferences: rows of prompt, "
            "chosen and rejected."
        ),
    ] = "text",
    chat_template: Annotated[
        Path | None,
        Option(help="A Jinja file, for sft and preferences. Default: the one in the tokenizer's folder."),
    ] = None,
    ignore_key: Annotated[
        list[str] | None,
        Option(help="With sft and preferences: a key of rows or messages to drop. Any other unused key is refused."),
    ] = None,
    text_key: Annotated[
        str, _of_text(help="The key, or column, that holds the text. You can give several keys, separated by commas.")
    ] = "text",
    workers: Annotated[int | None, _of_text(help="Processes. Default: one per core. No effect on the result.")] = None,
    eos_token: Annotated[
        str | None,
        Option(metavar="TOKEN", help="The special token that ends documents. Default: the tokenizer's own."),
    ] = None,
    bos_token: Annotated[
        str | None,
        Option(metavar="TOKEN|auto", help="Begin documents with this special token. auto is the tokenizer's own."),
    ] = None,
    validation_fraction: Annotated[float, Option(help="Share of the documents to hold out into OUT-validation.")] = 0.0,
    canaries: Annotated[
        int | None, _of_text(help="Number of canaries (documents for an audit) to plant for each number in --repeats.")
    ] = None,
    repeats: Annotated[
        str, _of_text(help="How many times canaries are planted. Canaries planted 0 times are the control.")
    ] = "0,1,4,16",
    canary_tokens: Annotated[int, _of_text(help="Number of tokens per canary.")] = 100,
    canary_noise: Annotated[float, _of_text(help="Share of each copy's tokens that are replaced at random.")] = 0.0,
    canary_shift: Annotated[int, _of_text(help="Cut up to this many tokens off the start of each copy.")] = 0,
    canaries_from: Annotated[
        str | None, _of_text(metavar="FILE.jsonl|random", help="Texts of the canaries. Default: taken from the input.")
    ] = None,
    force: Annotated[bool, _of_text("--force", help="Build the corpus again, even if it is complete.")] = False,
) -> None:
    """Tokenize text into a corpus to train on.

    Writes Megatron-LM's indexed format (OUT.bin, OUT.idx), a description (OUT.json), and the tokenizer
    (OUT-tokenizer.json). An interrupted preparation continues when you start it again.

    --canaries plants documents a known number of times at random places and lists them in OUT-canaries.jsonl, which
    `fourfold audit` reads.

    Example: fourfold prepare python-stdlib --out data/stdlib --train-tokenizer 4096
    """
    from fourfold.data import prepare as data
    from fourfold.data.atomic_files import WriteFailed
    from fourfold.data.canaries import Canaries
    from fourfold.data.prepare_conversations import prepare_conversations

    refused = _given(command_line, CONVERSATION_OPTIONS if format == "text" else TEXT_OPTIONS)
    if refused:
        raise UserError(f"--format {format} does not take {refused[0]}; leave {refused[0]} out")
    common: dict[str, Any] = {"tokenizer": tokenizer, "eos_token": eos_token, "bos_token": bos_token}
    common["validation_fraction"] = validation_fraction
    if format != "text":
        if tokenizer is None:
            raise UserError(f"--format {format} needs --tokenizer DIR, the model's folder")
        template, keys = chat_template, ignore_key or ()
        summary = prepare_conversations(inputs, out, chat_template=template, ignored_keys=keys, format=format, **common)
        _show(summary)
        return
    wanted = None
    if canaries is not None:
        wanted = Canaries(canaries, _numbers(repeats), canary_tokens, canary_noise, canary_shift, canaries_from)
    elif _given(command_line, CANARY_OPTIONS):
        raise UserError("--repeats and the --canary options need --canaries N, such as --canaries 200")
    try:
        summary = data.prepare(
            inputs,
            out,
            train_tokenizer_vocab=train_tokenizer,
            workers=workers,
            text_key=text_key,
            canaries=wanted,
            force=force,
            **common,
        )
    except WriteFailed as error:
        kept = f"; finished parts stay in {out}.parts for the next attempt" if Path(f"{out}.parts").exists() else ""
        raise UserError(f"{error}{kept}") from error
    _show(summary)


def _given(command_line: Context, names: Sequence[str]) -> list[str]:
    """Return the options in `names` that the user has given. The names in the result are spelled as on the command
    line. For example, text_key becomes --text-key."""
    given = [name for name in names if command_line.get_parameter_source(name) is not ParameterSource.DEFAULT]
    return [f"--{name.replace('_', '-')}" for name in given]


def _show(summary: PrepareSummary) -> None:
    if summary.reused:
        echo("Already prepared from the same files in the same way; --force builds it again.")
    for manifest in filter(None, (summary.train, summary.validation)):
        what = f"{manifest.split}: {counted(manifest.documents, 'document')}, {manifest.tokens:,} tokens"
        if manifest.trained_tokens is None:
            what += f", {manifest.bytes:,} bytes, {manifest.bytes / manifest.tokens:.2f} bytes/token"
        else:
            what += f", {manifest.trained_tokens / manifest.tokens:.1%} of them trained"
        echo(what)
    echo(f"tokenizer: {summary.train.vocab_size:,} ids, stored as {summary.train.dtype}")
    for note in summary.notes:
        echo(note)
    echo(f"{summary.seconds:.1f} s: {', '.join(map(str, summary.files))}")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--repeats {text!r} is not a list of whole numbers; write it as 0,1,4,16") from None
