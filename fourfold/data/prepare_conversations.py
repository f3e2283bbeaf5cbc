"""Prepare a corpus on disk from conversations. Each token has a flag that says whether the token is trained."""

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fourfold.data.chat import ChatTemplate
from fourfold.data.conversation_rows import Completion, Conversation, read_pair, read_row
from fourfold.data.indexed import IndexedWriter, bin_path, idx_path
from fourfold.data.manifest import CorpusSplit, manifest_path, trained_prefix, validation_prefix, write_manifests
from fourfold.data.order import falls_within
from fourfold.data.prepare import PrepareSummary, check_fraction, collect_notes, unfinished
from fourfold.data.shards import digest
from fourfold.data.sources import InputFile, list_inputs, read_rows
from fourfold.data.tokenizer import Tokenizer, encode_completion, load_tokenizer
from fourfold.errors import UserError, given_as

_FLAG_VALUES = 2
"""Number of flag values. The flags are stored like tokens, with this vocabulary size."""


def prepare_conversations(
    inputs: Iterable[str | Path],
    output_prefix: str | Path,
    *,
    tokenizer: str | Path,
    chat_template: str | Path | None = None,
    eos_token: str | None = None,
    bos_token: str | None = None,
    ignored_keys: Collection[str] = (),
    validation_fraction: float = 0.0,
    seed: int = 0,
    format: Literal["sft", "preferences"] = "sft",
) -> PrepareSummary:
    """Tokenize conversations into OUT.bin, OUT.idx, and OUT.json, and write one flag per token to OUT-trained.*.

    `read_row` and `read_pair` describe the forms of a row. A flag is 1 if the token is trained, and otherwise 0. With
    `format` "preferences", a row becomes two documents: the prompt with the chosen answer, and the prompt with the
    rejected answer. OUT.json is written last.

    Args:
        inputs: Files, folders, globs, or "hf:NAME[:CONFIG][:SPLIT]" (see `list_inputs`).
        output_prefix: OUT, the common beginning of the paths of all files to write.
        tokenizer: "bytes", or the folder of a model (or its tokenizer.json). The model's chat template renders
            messages.
        chat_template: Jinja file with a chat template to use instead of the model's own.
        eos_token: Special token that ends a completion (default: the tokenizer's own, see `HFTokenizer`).
        bos_token: Special token that begins a prompt, or "auto" for the tokenizer's own (default: none). Chat templates
            write their own tokens.
        ignored_keys: Keys of rows and messages to drop. Any other unused key is refused.
        validation_fraction: Fraction of the rows that go to OUT-validation instead, chosen by a seeded hash.
        seed: Seed of the hash.
        format: Format of the rows: "sft" or "preferences".

    Returns:
        The manifests and the files of the corpus, and notes about how the input was read.

    Raises:
        UserError: A row cannot be read or rendered (the message names file and line), an option is wrong, a split would
            be empty, or a file cannot be written.
    """
    began = time.monotonic()
    prefix, names = Path(output_prefix), [str(item) for item in inputs]
    check_fraction(validation_fraction)
    files = list_inputs(names)
    with given_as("--tokenizer"):
        loaded = load_tokenizer(tokenizer, eos_token, bos_token)
    reader = RowReader(tokenizer, loaded, chat_template, format, ignored_keys)
    with unfinished(prefix):
        splits = _write_splits(reader, files, names, prefix, validation_fraction, seed)
        described = [[file.path, file.size, file.mtime_ns] for file in files]
        request = {"inputs": names, "text_key": "messages", "validation_fraction": validation_fraction, "seed": seed}
        request |= {"request": digest([*described, reader.identity, validation_fraction, seed]), "format": format}
        train, validation = write_manifests(splits, prefix, loaded, **request)
    prefixes = [p for split in splits.values() for p in (split.prefix, trained_prefix(split.prefix))]
    paths = [path(each) for each in prefixes for path in (bin_path, idx_path)]
    notes = tuple(collect_notes(names, loaded if reader.has_completions else None))
    return PrepareSummary(train, validation, paths, time.monotonic() - began, reused=False, notes=notes)


def _write_splits(
    reader: "RowReader", files: list[InputFile], names: list[str], prefix: Path, validation_fraction: float, seed: int
) -> dict[str, CorpusSplit]:
    """Write the tokens and the flags of every conversation to the corpus of its split. Return the splits by name."""
    splits = {"train": CorpusSplit(prefix, trained_tokens=0)}
    if validation_fraction:
        splits["validation"] = CorpusSplit(Path(validation_prefix(prefix)), trained_tokens=0)
    with ExitStack() as stack:
        tokens, answers = {}, {}
        for name, split in splits.items():
            tokens[name] = stack.enter_context(IndexedWriter(split.prefix, reader.tokenizer.vocab_size))
            answers[name] = stack.enter_context(IndexedWriter(trained_prefix(split.prefix), _FLAG_VALUES))
        rows = (row for file in files for row in reader.read(file.path))
        for number, documents in enumerate(rows):
            held_out = bool(falls_within(np.array([number]), validation_fraction, seed)[0])
            name = "validation" if held_out else "train"
            for ids, trained, text_bytes in documents:
                tokens[name].add_document(ids)
                answers[name].add_document(trained.astype(np.int64))
                splits[name].count(1, len(ids), text_bytes, int(trained.sum()))
        for name, split in splits.items():
            if split.documents == 0:
                raise UserError(f"{', '.join(names)}: no conversation is left for {name}; change --validation-fraction")
        # All rows have been read without an error. Only now make an earlier corpus invalid, by removing its manifests.
        for target in (prefix, validation_prefix(prefix)):
            manifest_path(target).unlink(missing_ok=True)
    return splits


@dataclass
class RowReader:
    """Reads the rows of files and tokenizes them. It loads the chat template only when a conversation needs it."""

    name: str | Path
    """"bytes", or the folder of a model. It says where the tokenizer and the chat template come from."""
    tokenizer: Tokenizer
    """The opened tokenizer."""
    chat_template: str | Path | None
    """Jinja file with a chat template. None uses the model's own template."""
    format: str
    """Format of the rows: "sft" or "preferences"."""
    ignored: Collection[str]
    """Keys of rows and messages to drop."""
    has_completions: bool = False
    """Whether a row with a prompt and its completion has been read."""
    _template: ChatTemplate | None = None

    @property
    def identity(self) -> str:
        """Return a text that identifies how rows become tokens: the tokenizer's fingerprint and, if a row has needed
        it, the chat template."""
        return self.tokenizer.fingerprint + ("" if self._template is None else self._template.source)

    def read(self, path: str) -> Iterator[list[tuple[NDArray[np.int64], NDArray[np.bool_], int]]]:
        """Yield a list of documents for each row. A document is a tuple: its token ids, a flag for each token that says
        whether the token is trained, and the number of UTF-8 bytes of its text.

        Raises:
            UserError: A row cannot be read or rendered, or none of its tokens is trained.
        """
        read = read_pair if self.format == "preferences" else read_row
        for where, row in read_rows(path):
            documents = []
            try:
                for part in read(row, self.ignored):
                    ids, trained = self._encode(part)
                    if not trained.any():
                        raise ValueError(
                            "no token of the conversation is trained: its answers are empty or have weight 0; "
                            "remove the row"
                        )
                    documents.append((ids, trained, _text_bytes(part)))
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
            yield documents

    def _encode(self, part: Conversation | Completion) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if isinstance(part, Completion):
            self.has_completions = True
            return encode_completion(part.prompt, part.text, self.tokenizer)
        if self._template is None:
            self._template = ChatTemplate(self.name, self.chat_template, self.ignored)
        return self._template.encode(part.messages, part.prompt, part.options)


def _text_bytes(part: Conversation | Completion) -> int:
    if isinstance(part, Completion):
        return len((part.prompt + part.text).encode())
    contents = [message.get("content") or "" for message in part.messages]
    texts = [each if isinstance(each, str) else "".join(piece["text"] for piece in each) for each in contents]
    return sum(len(text.encode()) for text in texts)
