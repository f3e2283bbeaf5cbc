"""fourfold loki: calibrate, evaluate"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from fourfold.cli import loki_options as options
from fourfold.cli.options import AsJson

loki = typer.Typer(
    no_args_is_help=True, help="Long-context generation with low-rank keys: calibrate a model, and see what it loses."
)

Texts = Annotated[list[Path], typer.Option("--text", metavar="FILE", help="Plain text; repeatable.")]
WindowLength = Annotated[
    int | None,
    typer.Option("--seq-len", min=1, help="Tokens of a window. Default: the model's positions, at most 2048."),
]
DEFAULT_LENGTH = 2048


@loki.command()
def calibrate(
    model: options.ModelName,
    text: Texts,
    out: Annotated[Path, typer.Option(metavar="BASIS.safetensors", help="The file to write.")],
    seq_len: WindowLength = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to read at most.")] = 100_000,
    basis: Annotated[
        str, typer.Option(help="pre, post, or both: the better one is then taken for each layer.")
    ] = "both",
    report: Annotated[Path | None, typer.Option(metavar="RANKS.html", help="Write the ranks as a page.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="RANKS.png", help="Draw them (needs matplotlib).")] = None,
    tokenizer: options.TokenizerName = None,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Find the directions in which a model's keys lie, and write them as a basis for Loki.

    Prints how many directions explain 90 % of the variance, layer by layer. Text of the kind and length that will be
    generated from is best; a few tens of thousands of tokens are enough.

    Example: fourfold loki calibrate --model exported --text book.txt --out basis.safetensors --report ranks.html
    """
    from fourfold.errors import UserError

    if basis not in ("pre", "post", "both"):
        raise UserError(f"--basis {basis} is none of pre, post, both")
    options.checked_dtype(dtype)
    from fourfold.huggingface.convert import as_huggingface
    from fourfold.inference.loki import calibrate as find_basis
    from fourfold.reports.loki_report import import_matplotlib, write_rank_picture, write_rank_report
    from fourfold.reports.terminal import rank_table

    for file in filter(None, (out, report, picture)):
        _check_writable(file)
    if picture is not None:
        import_matplotlib()
    with as_huggingface(model) as names:
        opened, _, windows = _opened(names, tokenizer, dtype, device, text, seq_len, tokens)
        kinds = ("pre", "post") if basis == "both" else (basis,)
        found = find_basis(opened, windows, kinds, _progress("calibrating"))
    found.save(out)
    record = {"basis": str(out), "model": model, **found.record()}
    if report is not None:
        write_rank_report(record, report)
    if picture is not None:
        write_rank_picture(record, picture)
    _print(record, rank_table, as_json)


@loki.command()
def evaluate(
    model: options.ModelName,
    basis: Annotated[Path, typer.Option(metavar="BASIS.safetensors", help="Of `fourfold loki calibrate`.")],
    text: Texts = [],  # noqa: B006 (typer reads it, nobody writes it)
    seq_len: WindowLength = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to read at most.")] = 16,
    loki_values: options.LokiValues = [],  # noqa: B006
    tasks: Annotated[str, typer.Option(metavar="gsm8k,…", help="Tasks of lm-eval, with full attention and Loki.")] = "",
    limit: Annotated[int | None, typer.Option(help="Documents of each task.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="A folder of tasks of your own.")] = None,
    tokenizer: options.TokenizerName = None,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Say what Loki loses on a text: keys found, attention caught, perplexity.

    Beside it stand full attention, the exact best keys (no ranking can do better), and random directions (the control).
    With --tasks, tasks of lm-eval too, of which those that generate exercise decoding.

    Example: fourfold loki evaluate --model exported --basis basis.safetensors --text held_out.txt --loki d=32
    """
    from fourfold.errors import UserError

    if not text and not tasks:
        raise UserError("give --text FILE to measure on, or --tasks")
    options.checked_dtype(dtype)
    on_text, in_tasks = options.loki_config(loki_values, min_k=1, min_seq=0), options.loki_config(loki_values)
    from fourfold.huggingface.convert import as_huggingface
    from fourfold.inference.loki import LokiBasis
    from fourfold.inference.loki.quality import evaluate as measured
    from fourfold.reports.terminal import loki_tables

    names_of_tasks = [name.strip() for name in tasks.split(",") if name.strip()]
    if tasks:
        from fourfold.inference.lm_eval_tasks import import_lm_eval

        import_lm_eval()
    ranked_by = LokiBasis.load(basis)
    record: dict[str, Any] = {"model": model, "basis": str(basis)}
    with as_huggingface(model) as names:
        opened, tokens, found = _opened(names, tokenizer, dtype, device, text, seq_len, None)
        if tasks:
            from fourfold.inference.loki.loki_tasks import check_tokenizer

            check_tokenizer(tokens)
        if text:
            record |= measured(opened, found[:windows], ranked_by, on_text, _progress("evaluating"))
        if tasks:
            from fourfold.inference.loki.loki_tasks import evaluate_tasks

            record["tasks"] = evaluate_tasks(opened, tokens, ranked_by, in_tasks, names_of_tasks, limit, include_path)
    _print(record, loki_tables, as_json)


def _opened(
    names: tuple[str, str],
    tokenizer: str | None,
    dtype: str,
    device: str | None,
    files: list[Path],
    length: int | None,
    most_tokens: int | None,
) -> tuple[Any, Any, list[list[int]]]:
    """Model, tokenizer, and the files as windows."""
    from fourfold.huggingface.transformers_models import checked_ids, load_model, load_text, positions_of
    from fourfold.inference.text import windows_of

    text = load_text(tokenizer or names[1])
    model = load_model(names[0], dtype, device)
    positions = positions_of(model)
    length = length or min(DEFAULT_LENGTH, positions or DEFAULT_LENGTH)
    if positions is not None and length > positions:
        from fourfold.errors import UserError

        raise UserError(f"--seq-len {length} is more than the model's {positions} positions")
    windows = windows_of(text, files, length, most_tokens) if files else []
    for window in windows:
        checked_ids(model, window)
    return model, text, windows


def _check_writable(file: Path) -> None:
    """Before hours of work: raise ``UserError`` where a file cannot be written."""
    from fourfold.errors import UserError

    if file.is_dir():
        raise UserError(f"cannot write {file}: it is a folder")
    if not os.access(file.parent, os.W_OK):
        raise UserError(f"cannot write {file}: there is no folder {file.parent} that may be written to")


def _progress(name: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """A bar on a terminal."""
    if not sys.stderr.isatty():
        return iter
    from rich.console import Console
    from rich.progress import track

    return lambda items: track(items, description=name, console=Console(stderr=True), transient=True)


def _print(record: dict[str, Any], tables: Callable[[dict[str, Any]], None], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(record))
    else:
        tables(record)
