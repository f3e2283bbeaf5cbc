"""`fourfold generate`: continue a text, or chat with a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from fourfold.cli import options
from fourfold.cli.options import AsJson, show
from fourfold.data.progress import working
from fourfold.errors import UserError, given_as
from fourfold.processes import importing

if TYPE_CHECKING:
    from fourfold.data.transformers_tokenizer import TransformersTokenizer


def generate(
    model: options.ModelName,
    prompt: Annotated[str | None, Option(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, Option(metavar="FILE", help="A file with the text to continue.")] = None,
    chat: Annotated[
        bool, Option("--chat", help="Answer the text as a message of a chat. Without a text, chat until Ctrl-D.")
    ] = False,
    max_new_tokens: Annotated[int, Option(min=1, help="Largest number of tokens to add.")] = 100,
    temperature: Annotated[float, Option(help="0: always the most likely token.")] = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: Annotated[int, Option(help="Seed of the random draws.")] = 0,
    basis: Annotated[
        Path | None,
        Option(
            metavar="BASIS.safetensors",
            help="Use Loki attention with the basis in this file. `fourfold loki calibrate` writes the file.",
        ),
    ] = None,
    loki_values: options.LokiValues = [],  # noqa: B006 (typer only reads it)
    tokenizer: options.TokenizerName = None,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text, and print the speed and the size of the KV cache.

    If --model is a run or checkpoint of fourfold, the command first exports it to a temporary folder in the Hugging
    Face format.

    With --chat, the model answers the text. The prompt is then in the format of the model's chat template. If you give
    no text, the command reads your messages from standard input, one per line, and the model answers each of them.

    Example: fourfold generate --model exported --prompt "Once" --basis basis.safetensors
    """
    talks = chat and prompt is None and prompt_file is None
    if (prompt is None) == (prompt_file is None) and not talks:
        raise UserError("give either --prompt or --prompt-file, such as --prompt Once")
    if talks and (as_json or basis is not None):
        raise UserError(f"{'--json' if as_json else '--basis'} needs a single message; add --prompt TEXT to --chat")
    if loki_values and basis is None:
        raise UserError(
            f"--loki {loki_values[0]} needs --basis BASIS.safetensors, which fourfold loki calibrate writes"
        )
    with importing():
        from fourfold.data.transformers_tokenizer import TransformersTokenizer, load_any_tokenizer
        from fourfold.huggingface.export_model import as_huggingface
        from fourfold.huggingface.transformers_models import load_model
        from fourfold.inference.generate import Sampling, encode_prompt
        from fourfold.inference.generate import generate as continue_text
        from fourfold.reports.terminal import generation_line
        from fourfold.untrusted_files import read_text_file

    if prompt_file is not None:
        prompt = read_text_file(prompt_file, "--prompt-file", "give a text file, or --prompt")
    sampling = Sampling(temperature, top_k, top_p, seed)
    with as_huggingface(model) as (folder, own_tokenizer):
        text = load_any_tokenizer(tokenizer or own_tokenizer)
        if chat:
            if not (isinstance(text, TransformersTokenizer) and text.tokenizer.chat_template):
                raise UserError(f"--chat needs a chat template, but {model} has none; leave out --chat")
            prompt = None if prompt is None else text.chat_prompt([prompt])
        with importing(), working("Loading the model"):  # ``load_model`` imports transformers, which is slow.
            opened = load_model(folder, dtype, device)
        write = (lambda text: None) if as_json else partial(print, end="", flush=True)
        if prompt is None:
            assert isinstance(text, TransformersTokenizer)
            limits = (max_new_tokens, sampling, write)
            _converse(text, lambda talk: continue_text(opened, text, talk, *limits, shows_prompt=False).text)
            return
        if basis is not None:
            from fourfold.inference.loki import LokiBasis, enable_loki

            config = options.loki_config(loki_values)
            with given_as("--basis"):
                ranked_by = LokiBasis.load(basis)
            capacity = len(encode_prompt(opened, text, prompt)) + max_new_tokens
            enable_loki(opened, ranked_by, config, capacity=capacity)
            if used := [f"{name} = {value:g}" for name, value in ranked_by.missing(config).items()]:
                print(f"note: calibration chose {' and '.join(used)}", file=sys.stderr)
        done = continue_text(opened, text, prompt, max_new_tokens, sampling, write)
    show(asdict(done), as_json, lambda record: print(f"\n\n{generation_line(record)}"))


def _converse(tokenizer: TransformersTokenizer, answer: Callable[[str], str]) -> None:
    """Read messages from standard input until it ends. For each message, call ``answer`` with a prompt that holds the
    whole chat so far. ``answer`` prints and returns the reply."""
    said: list[str] = []
    with suppress(EOFError):
        while True:
            said.append(input("> "))
            said.append(answer(tokenizer.chat_prompt(said)))
            print("\n")
