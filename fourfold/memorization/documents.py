"""Read, tokenize, and check the documents of an audit before a model is loaded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fourfold.data.canaries import Canaries
from fourfold.data.sources import read_json_lines
from fourfold.data.tokenizer import begin_of
from fourfold.data.transformers_tokenizer import AnyTokenizer, TransformersTokenizer, eod_of, has_ids_of
from fourfold.errors import UserError

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class AuditDocument:
    """One document to audit."""

    tokens: Tokens
    text: str | None
    count: int | None
    """Number of times the model was trained on the document. None if unknown."""
    canary: int | None = None
    """Index of the document among the canaries of ``fourfold prepare``. None if the document is not a canary."""
    planted: Canaries | None = None
    """How the planted copies of a canary differ from it (noise and shift). None if the document is not a canary."""
    eod_id: int | None = None
    """Id of the token that ends the document in its corpus. None if unknown."""

    @property
    def shift(self) -> int:
        """Return the largest number of tokens that were cut off the start of a planted copy. 0 if the document is
        not a canary."""
        return 0 if self.planted is None else self.planted.shift

    def cut(self, longest: int) -> Self:
        """Return the document with only its first ``longest`` tokens."""
        return replace(self, tokens=self.tokens[:longest])


def read_documents(
    path: Path,
    tokenizer: AnyTokenizer | None,
    *,
    vocab_size: int,
    shortest: int,
    text_key: str = "text",
) -> list[AuditDocument]:
    """Read the documents of an audit.

    Args:
        path: A .jsonl file. Each line has "text", or "tokens" if ``fourfold prepare --canaries`` wrote it.
        tokenizer: The model's tokenizer. If it is None (unknown), each line needs "tokens".
        vocab_size: Size of the model's vocabulary.
        shortest: Smallest allowed number of tokens in a document.
        text_key: Key of the text in each line.

    Returns:
        The documents, in the order of the file.

    Raises:
        UserError: A file or line cannot be used, a document has fewer than ``shortest`` tokens, or the "tokens" come
            from another tokenizer than the model's.
    """
    found = []
    for where, row in read_json_lines(path):
        tokens = _tokens(where, row, tokenizer, text_key)
        if len(tokens) < shortest:
            raise UserError(
                f"{where} has {len(tokens)} tokens, but prefix and suffix need {shortest} tokens; leave the document "
                "out, or lower --suffix and --prefix"
            )
        if len(outside := tokens[(tokens >= vocab_size) | (tokens < 0)]):
            raise UserError(
                f"{where} has token {outside[0]}, but the model's vocabulary ends at {vocab_size - 1}: the document "
                "was made with another tokenizer"
            )
        count = row.get("count")
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
            raise UserError(f'{where} has {json.dumps(count)} as "count"; it must be a whole number of 0 or more')
        text, made_with = row.get(text_key), row.get("tokenizer")
        end = None if tokenizer is None else eod_of(tokenizer, None if made_with is None else str(made_with))
        found.append(AuditDocument(tokens, text if isinstance(text, str) else None, count, *_origin(row), end))
    if not found:
        raise UserError(f"{path} has no document; give one JSON object per line")
    return found


def with_others_before(documents: Sequence[AuditDocument], offset: int) -> list[Tokens]:
    """Put ``offset`` tokens of other documents before each document, as in packed training sequences. Return the token
    ids of each result.

    Each of the other documents is followed by its end token, if this token is known. An offset is useful because recall
    can depend on a document's position in the context (arXiv 2505.13171).

    Raises:
        UserError: The other documents have too few tokens.
    """
    found = []
    for number, document in enumerate(documents):
        before, missing = list[Tokens](), offset
        for other in [*documents[number + 1 :], *documents[:number]]:
            if missing <= 0:
                break
            end = [] if other.eod_id is None else [other.eod_id]
            before.insert(0, np.array([*other.tokens, *end], dtype=np.int64)[-missing:])
            missing -= len(before[0])
        if missing > 0:
            raise UserError(f"--offset {offset} needs {missing} more tokens of other documents; give more documents")
        found.append(np.concatenate([*before, document.tokens]))
    return found


def _tokens(where: object, row: dict[str, Any], tokenizer: AnyTokenizer | None, text_key: str) -> Tokens:
    tokens, text = row.get("tokens"), row.get(text_key)
    if tokens is not None:
        if not isinstance(tokens, list) or not all(_is_whole(token) for token in tokens):
            raise UserError(f'{where} has "tokens" that are not a list of token ids; give whole numbers')
        made_with = row.get("tokenizer")
        if tokenizer is not None and made_with is not None and not has_ids_of(tokenizer, str(made_with)):
            raise UserError(
                f"{where} was tokenized with another tokenizer than the model's; name that tokenizer with "
                "--tokenizer, or prepare the canaries with the model's"
            )
        return np.array(tokens, dtype=np.int64)
    if not isinstance(text, str):
        raise UserError(f'{where} has neither "{text_key}" nor "tokens"; name the key with --text-key')
    if not text:
        raise UserError(f"{where} is an empty document; leave it out")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} has a lone surrogate (half of a UTF-16 pair); leave it out") from None
    if tokenizer is None:
        raise UserError(
            f"{where} is text, but nothing says which tokenizer the model was trained with; name the tokenizer with "
            "--tokenizer"
        )
    # Do not add the beginning-of-text token for transformers' tokenizers, because they add it themselves.
    begin = [] if isinstance(tokenizer, TransformersTokenizer) else begin_of(tokenizer)
    return np.array([*begin, *tokenizer.encode_batch([text])[0]], dtype=np.int64)


def _origin(row: dict[str, Any]) -> tuple[int | None, Canaries | None]:
    """Return the index of a canary, and then how its planted copies differ from it. Both are None if the document is
    not a canary of ``fourfold prepare``."""
    noise = row.get("noise")
    if not isinstance(noise, int | float) or not 0 <= noise < 1:
        return None, None
    if not all(_is_whole(row.get(key)) for key in ("id", "shift", "seed")):
        return None, None
    return row["id"], Canaries(count=1, repeats=(1,), noise=float(noise), shift=row["shift"], seed=row["seed"])


def _is_whole(value: Any) -> bool:
    """Return whether ``value`` is an integer that fits into an int64 array."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
