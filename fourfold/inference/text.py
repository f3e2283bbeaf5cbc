"""Read text files, and cut them into windows of token ids for calibration and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fourfold.data.transformers_tokenizer import AnyTokenizer
from fourfold.errors import UserError
from fourfold.untrusted_files import read_text_file

MIN_WINDOW = 16
"""Smallest number of tokens in a window."""

TEXT_FILE = "give a text file in UTF-8"
"""Advice at the end of error messages about a file of `--text`."""


def token_windows(
    tokenizer: AnyTokenizer, files: Sequence[Path], length: int, max_tokens: int | None = None
) -> list[list[int]]:
    """Cut files into windows of ``length`` token ids. Drop the end of a file if it does not fill a window.

    Each window begins with the tokens that the tokenizer puts before every text, such as a BOS token.

    Args:
        tokenizer: The tokenizer.
        files: The text files.
        length: Number of tokens in a window.
        max_tokens: Largest number of tokens in all windows together. None means no limit. The result always has at
            least one window.

    Raises:
        UserError: ``length`` is below ``MIN_WINDOW``, a file cannot be read, or no file fills a window.
    """
    if length < MIN_WINDOW:
        raise UserError(f"--seq-len {length} is too short; give at least {MIN_WINDOW}")
    prefix = tokenizer.encode_batch([""])[0]
    step = length - len(prefix)
    windows: list[list[int]] = []
    for file in files:
        ids = tokenizer.encode_batch([read_text_file(file, "--text", TEXT_FILE)])[0][len(prefix) :]
        windows += [prefix + ids[begin : begin + step] for begin in range(0, len(ids) - step + 1, step)]
        if max_tokens is not None and len(windows) * length >= max_tokens:
            windows = windows[: max(1, max_tokens // length)]
            break
    if not windows:
        raise UserError(
            f"--text {' '.join(map(str, files))} is shorter than one window of --seq-len {length} tokens; give "
            "more text, or a smaller --seq-len"
        )
    return windows
