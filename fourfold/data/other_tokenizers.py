"""Recognize tokenizer files in formats other than tokenizer.json, and tell the user how to convert them."""

import re
from pathlib import Path

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")
_PATTERNS = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt")


def describe_other_tokenizer(path: Path) -> str | None:
    """Return a sentence that names the format of the tokenizer file at or in `path` and says how to convert it.

    Returns None if the format is unknown.
    """
    found = [path] if path.is_file() else [file for pattern in _PATTERNS for file in sorted(path.glob(pattern))]
    file = next((file for file in found if file.is_file() and any(map(file.match, _PATTERNS))), None)
    if file is None:
        return None
    with file.open("rb") as opened:
        is_tiktoken = _TIKTOKEN_LINE.match(opened.read(1000)) is not None
    if is_tiktoken or file.suffix == ".tiktoken":
        return (
            f"{file} is a tiktoken file, which lacks the model's special tokens; name a folder of the same model that "
            "has a tokenizer.json, or write one with transformers.integrations.tiktoken.convert_tiktoken_to_fast"
        )
    kind, needs = "an older format of transformers", ""
    if file.suffix == ".model":
        kind, needs = "a sentencepiece file", " (it needs pip install sentencepiece protobuf)"
    elif file.name == "tekken.json":
        kind = "a mistral-common file"
    convert = f'AutoTokenizer.from_pretrained("{file.parent}").save_pretrained("{file.parent}")'
    return f"{file} is {kind}; convert it once: python -c 'from transformers import AutoTokenizer; {convert}'{needs}"
