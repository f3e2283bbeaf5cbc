"""fourfold generate"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli import options
from fourfold.cli.options import AsJson, show
from fourfold.data.progress import working
from fourfold.errors import UserError, given_as
from fourfold.processes import importing


def generate(
    model: options.ModelName,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A file with the text.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer the text as a message of a chat.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to add.")] = 100,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    basis: Annotated[
        Path | None,
        typer.Option(
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

    With --chat, the model answers the text. The prompt is then in the format of the model's chat template.

    Example: fourfold generate --model exported --prompt "Once" --basis basis.safetensors
    """
    if (prompt is None) == (prompt_file is None):
        raise UserError("give --prompt or --prompt-file, such as --prompt Once, and not both")
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
    assert prompt is not None
    sampling = Sampling(temperature, top_k, top_p, seed)
    with as_huggingface(model) as (folder, own_tokenizer):
        text = load_any_tokenizer(tokenizer or own_tokenizer)
        if chat:
            if not (isinstance(text, TransformersTokenizer) and text.tokenizer.chat_template):
                raise UserError(f"--chat needs a chat template, and {model} has none; leave out --chat")
            prompt = text.chat_prompt(prompt)
        with importing(), working("Loading the model"):  # ``load_model`` imports transformers, which is slow.
            opened = load_model(folder, dtype, device)
        if basis is not None:
            from fourfold.inference.loki import LokiBasis, enable_loki

            config = options.loki_config(loki_values)
            with given_as("--basis"):
                ranked_by = LokiBasis.load(basis)
            capacity = len(encode_prompt(opened, text, prompt)) + max_new_tokens
            enable_loki(opened, ranked_by, config, capacity=capacity)
        write = (lambda text: None) if as_json else partial(print, end="", flush=True)
        done = continue_text(opened, text, prompt, max_new_tokens, sampling, write)
    show(asdict(done), as_json, lambda record: print(f"\n\n{generation_line(record)}"))
