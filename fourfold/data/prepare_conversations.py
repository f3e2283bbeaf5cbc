"""Prepares a corpus on disk from conversations: tokens, and a flag for each that is trained."""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fourfold.data.chat import ChatTemplate, encode_completion
from fourfold.data.indexed import IndexedWriter, bin_path, idx_path
from fourfold.data.manifest import Split, manifest_path, trained_prefix, validation_prefix, write_manifests
from fourfold.data.merge import falls_within
from fourfold.data.prepare import PrepareSummary, check_fraction, unfinished
from fourfold.data.shards import digest
from fourfold.data.sources import list_inputs, read_rows
from fourfold.data.tokenizer import Tokenizer, load_tokenizer
from fourfold.errors import UserError

_BINARY = 2
"""Vocabulary of the flags."""


def prepare_conversations(
    inputs: Iterable[str | Path],
    output_prefix: str | Path,
    *,
    tokenizer: str | Path,
    chat_template: str | Path | None = None,
    validation_fraction: float = 0.0,
    seed: int = 0,
    format: Literal["sft", "preferences"] = "sft",
) -> PrepareSummary:
    """Tokenize conversations into OUT.bin, OUT.idx and OUT.json, and a flag for each trained token into OUT-trained.*.

    A row has `messages`, a list of {role, content} that the chat template of `tokenizer`'s folder (or `chat_template`)
    renders, or `prompt` and `completion`. With `format` "preferences" it has `chosen` and `rejected`, each an answer to
    `prompt` or such a list of messages, and becomes two documents, one after the other. `validation_fraction`: the
    share of the rows, chosen by a hash of their number and `seed`, that goes to OUT-validation instead. OUT.json is
    written last.

    Raises UserError naming the file and the line for what cannot be read or rendered.
    """
    began = time.monotonic()
    prefix, names = Path(output_prefix), [str(item) for item in inputs]
    check_fraction(validation_fraction)
    files = list_inputs(names)
    loaded = load_tokenizer(tokenizer)
    reader = _Rows(tokenizer, loaded, chat_template, format)
    with unfinished(prefix):
        splits = {"train": Split(prefix, trained=0)}
        if validation_fraction:
            splits["validation"] = Split(Path(validation_prefix(prefix)), trained=0)
        with ExitStack() as stack:
            tokens, answers = {}, {}
            for name, split in splits.items():
                tokens[name] = stack.enter_context(IndexedWriter(split.prefix, loaded.vocab_size))
                answers[name] = stack.enter_context(IndexedWriter(trained_prefix(split.prefix), _BINARY))
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
                    raise UserError(f"{', '.join(names)}: there is no conversation for {name}")
            # An earlier corpus of that name is given up only after every row has been read.
            for target in (prefix, validation_prefix(prefix)):
                manifest_path(target).unlink(missing_ok=True)
        train, validation = write_manifests(
            splits,
            prefix,
            loaded,
            inputs=names,
            text_key="messages",
            validation_fraction=validation_fraction,
            seed=seed,
            request=digest(
                [[f.path, f.size, f.mtime_ns] for f in files] + [reader.identity, validation_fraction, seed]
            ),
            format=format,
        )
    prefixes = [p for split in splits.values() for p in (split.prefix, trained_prefix(split.prefix))]
    paths = [path(each) for each in prefixes for path in (bin_path, idx_path)]
    return PrepareSummary(train, validation, paths, time.monotonic() - began, reused=False)


class _Rows:
    """Reads rows of either kind; the template is loaded when the first conversation needs it."""

    def __init__(self, name: str | Path, tokenizer: Tokenizer, chat_template: str | Path | None, format: str) -> None:
        self._name, self._tokenizer, self._template_file = name, tokenizer, chat_template
        self._parts = _pair_of if format == "preferences" else _row_alone
        self._template: ChatTemplate | None = None

    @property
    def identity(self) -> str:
        """The tokenizer and the template, which with the rows decide the tokens."""
        return self._tokenizer.fingerprint + ("" if self._template is None else self._template.source)

    def read(self, path: str) -> Iterator[list[tuple[NDArray[np.int64], NDArray[np.bool_], int]]]:
        """Yield the documents of each row: the tokens, whether each is trained, and the bytes of the text."""
        for where, row in read_rows(path):
            documents = []
            try:
                for part in self._parts(row):
                    ids, trained = self._encode(part)
                    if not trained.any():
                        raise ValueError("nothing of the conversation is trained; its answers may be empty")
                    documents.append((ids, trained, _text_bytes(part)))
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
            yield documents

    def _encode(self, row: dict[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if "messages" in row:
            if self._template is None:
                self._template = ChatTemplate(self._name, self._template_file)
            return self._template.encode(row["messages"], row.get("prompt_messages", 0))
        if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
            return encode_completion(row["prompt"], row["completion"], self._tokenizer)
        raise ValueError(
            f"a row has messages, or prompt and completion; this one has {', '.join(sorted(row)) or 'nothing'}"
        )


def _row_alone(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row]


def _pair_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of chosen and rejected answers as two rows, the chosen one first."""
    prompt, answers = row.get("prompt"), [row.get("chosen"), row.get("rejected")]
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return [{"prompt": prompt, "completion": answer} for answer in answers]
    if all(isinstance(answer, list) for answer in answers) and isinstance(prompt, list | None):
        lists = [[*(prompt or []), *answer] for answer in answers if isinstance(answer, list)]
        asked = len(prompt) if prompt else _shared_messages(*lists)
        return [{"messages": messages, "prompt_messages": asked} for messages in lists]
    raise ValueError(
        "a row has prompt, chosen and rejected as texts, or chosen and rejected as lists of messages; this one has "
        f"{', '.join(sorted(row)) or 'nothing'}"
    )


def _shared_messages(chosen: list[Any], rejected: list[Any]) -> int:
    """Messages with which both answers begin; without a prompt of its own they are the prompt."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next((number for number, (one, other) in pairs if one != other), 0)


def _text_bytes(row: dict[str, Any]) -> int:
    of_messages = [message["content"] for message in row.get("messages", [])]
    texts = of_messages or [row["prompt"], row["completion"]]
    return sum(len(text.encode()) for text in texts if isinstance(text, str))
