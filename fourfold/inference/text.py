"""Read text files, and cut them into windows of token ids for calibration and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fourfold.data.transformers_tokenizer import AnyTokenizer
from fourfold.errors import UserError

MIN_WINDOW = 16


def read_text(file: Path, option: str) -> str:
    """Read a UTF-8 file. Raise a ``UserError`` with its ``option`` if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {option} {file} as UTF-8: {getattr(error, 'strerror', error)}") from None


def token_windows(
    tokenizer: AnyTokenizer, files: Sequence[Path], length: int, max_tokens: int | None = None
) -> list[list[int]]:
    """Cut files into windows of ``length`` ids, and leave out the end of a file that does not fill a window.

    Each window begins with the tokens that the tokenizer puts before a text, as in a prompt.

    Raises:
        UserError: A file cannot be read, or no file fills a window.
    """
    if length < MIN_WINDOW:
        raise UserError(f"--seq-len {length} is too short; give at least {MIN_WINDOW}")
    prefix = tokenizer.encode_batch([""])[0]
    step = length - len(prefix)
    windows: list[list[int]] = []
    for file in files:
        ids = tokenizer.encode_batch([read_text(file, "--text")])[0][len(prefix) :]
        windows += [prefix + ids[begin : begin + step] for begin in range(0, len(ids) - step + 1, step)]
        if max_tokens is not None and len(windows) * length >= max_tokens:
            windows = windows[: max(1, max_tokens // length)]
            break
    if not windows:
        raise UserError(f"the text is shorter than one window of {length} tokens; give more, or a smaller --seq-len")
    return windows
