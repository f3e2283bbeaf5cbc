"""Text files as windows of token ids, for calibration and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fourfold.errors import UserError
from fourfold.huggingface.transformers_models import TextTokenizer

SHORTEST = 16


def windows_of(
    tokenizer: TextTokenizer, files: Sequence[Path], length: int, most_tokens: int | None = None
) -> list[list[int]]:
    """Windows of ``length`` ids, one file after the other; the rest of a file that fills none is left out.

    Each begins with what the model expects in front of a text, as a prompt would. Raises ``UserError`` for a file that
    cannot be read, and when there is not one window.
    """
    if length < SHORTEST:
        raise UserError(f"--seq-len {length} is too short; give at least {SHORTEST}")
    prefix = tokenizer.encode("")
    step = length - len(prefix)
    found: list[list[int]] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the text {file}: {error}") from None
        ids = tokenizer.encode(text)[len(prefix) :]
        found += [prefix + ids[begin : begin + step] for begin in range(0, len(ids) - step + 1, step)]
        if most_tokens is not None and len(found) * length >= most_tokens:
            found = found[: max(1, most_tokens // length)]
            break
    if not found:
        raise UserError(f"the text has less than one window of {length} tokens; give more, or a smaller --seq-len")
    return found
