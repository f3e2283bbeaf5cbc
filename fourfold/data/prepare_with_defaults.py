"""Prepare text or conversations with options that suit the input, for users who choose no options."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from fourfold.data.prepare import PrepareSummary, prepare
from fourfold.data.prepare_conversations import prepare_conversations
from fourfold.data.sources import TABLES, InputFile, list_inputs, read_documents, read_rows
from fourfold.data.tokenizer import OWN, HFTokenizer
from fourfold.errors import UserError, given_as

BYTES_PER_TOKEN = 250
"""A new tokenizer gets at most one token per this many bytes of input, so that most tokens occur often. But it gets at
least ``SMALLEST_VOCABULARY`` tokens."""
SMALLEST_VOCABULARY = 512
HELD_OUT = 0.05
"""Fraction of the documents to hold out for validation, if there are at least ``ENOUGH`` documents."""
ENOUGH = 40
"""If there are fewer documents than this number, none are held out. With ``HELD_OUT`` and seed 0, the 40th document is
the first one that is held out, so fewer documents would give an empty validation corpus."""
CONVERSATION_KEYS = {"messages", "conversations", "instruction", "completion"}
"""A row is a conversation if it has one of these keys, and no key "text"."""


def prepare_with_defaults(data: str, prefix: Path, tokenizer: Path | None, largest_vocabulary: int) -> PrepareSummary:
    """Tokenize text or conversations, and hold out a few documents for validation if there are enough.

    Args:
        data: A file, a folder, a glob, "python-stdlib", or "hf:NAME[:CONFIG][:SPLIT]" (see ``list_inputs``).
        prefix: Prefix of the files to write.
        tokenizer: Folder of a model whose tokenizer and chat template are used. None trains a tokenizer on the text.
        largest_vocabulary: Largest vocabulary size of a trained tokenizer. For a small input, the size is smaller.

    Raises:
        UserError: The data cannot be read, or conversations are given without a tokenizer.
    """
    with given_as("--data"):
        files = list_inputs([data])
        if _holds_conversations(files[0]):
            if tokenizer is None:
                raise UserError(f"{data} has conversations; give --model a Hugging Face model with a chat template")
            fraction = _fraction_to_hold_out(row for file in files for row in read_rows(file.path))
            return prepare_conversations([data], prefix, tokenizer=tokenizer, validation_fraction=fraction)
        fraction = _fraction_to_hold_out(text for file in files for text in read_documents(file.path))
        suitable = max(SMALLEST_VOCABULARY, sum(file.size for file in files) // BYTES_PER_TOKEN)
        return prepare(
            [data],
            prefix,
            tokenizer=tokenizer,
            train_tokenizer_vocab=min(largest_vocabulary, suitable) if tokenizer is None else None,
            bos_token=OWN if tokenizer is not None and HFTokenizer(tokenizer).usually_begins else None,
            validation_fraction=fraction,
        )


def _holds_conversations(file: InputFile) -> bool:
    """Return whether the first row of a file is a conversation."""
    if not file.path.endswith((".jsonl", ".jsonl.gz", *TABLES)):
        return False
    _, row = next(read_rows(file.path), ("", {}))
    return "text" not in row and not CONVERSATION_KEYS.isdisjoint(row)


def _fraction_to_hold_out(documents: Iterable[object]) -> float:
    return HELD_OUT if len(list(islice(documents, ENOUGH))) == ENOUGH else 0.0
