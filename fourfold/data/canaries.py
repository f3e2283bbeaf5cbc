"""Plant canaries: documents repeated a known number of times, so that an audit can measure the effect of repetition.

All canaries come from one pool, and each gets its number of repeats at random (Singh et al. 2024, arXiv 2502.08145).
Canaries with 0 repeats are the control: they differ from the repeated canaries only by chance. The ledger is a file
that lists the canaries, with one JSON object per line. `fourfold audit` reads it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fourfold.data.atomic_files import write_whole
from fourfold.data.indexed import IndexedDataset, IndexedWriter
from fourfold.data.manifest import CorpusSplit
from fourfold.data.order import hash64
from fourfold.data.sources import read_documents
from fourfold.data.tokenizer import Tokenizer
from fourfold.data.transformers_tokenizer import AnyTokenizer
from fourfold.errors import UserError, given_as

RANDOM = "random"
_MOST_PASSAGES = 1 << 20


@dataclass(frozen=True)
class Canaries:
    """How many canaries to plant, how often, and how their copies differ."""

    count: int
    """Number of canaries for each number in `repeats`."""
    repeats: tuple[int, ...]
    """How many copies of a canary to plant, as a list of different numbers. Canaries with 0 copies are the control."""
    length: int = 100
    """Number of tokens per canary."""
    noise: float = 0.0
    """Fraction of each copy's tokens that are replaced at random. If it is above 0, the copies of a canary are
    near-duplicates."""
    shift: int = 0
    """Maximum number of tokens that are cut off at the start of a copy."""
    source: str | None = None
    """Source of the canaries. None takes documents out of the corpus, "random" draws random tokens, and a path reads a
    .jsonl file."""
    seed: int = 0

    def check(self) -> None:
        """Check that the canaries can be planted.

        Raises:
            UserError: A value is out of range.
        """
        if self.count < 1:
            raise UserError(f"--canaries is {self.count}; it must be at least 1 for each number of repeats")
        if not self.repeats or min(self.repeats) < 0 or len(set(self.repeats)) < len(self.repeats):
            raise UserError(f"--repeats {list(self.repeats)} must be different numbers ≥ 0, such as 0,1,4,16")
        if self.length < 2:
            raise UserError(f"--canary-tokens is {self.length}; a canary needs at least 2 tokens")
        if not 0 <= self.noise < 1:
            raise UserError(f"--canary-noise is {self.noise}; it must be at least 0 and below 1")
        if not 0 <= self.shift <= self.length - 2:
            raise UserError(
                f"--canary-shift is {self.shift}; for {self.length} tokens it can be 0 to {self.length - 2}"
            )


def ledger_path(prefix: str | Path) -> Path:
    """Return the path of a corpus's ledger, the file that lists the canaries."""
    return Path(f"{prefix}-canaries.jsonl")


def copy_of(
    tokens: NDArray[np.int64], canary: int, copy: int, canaries: Canaries, tokenizer: AnyTokenizer
) -> NDArray[np.int64]:
    """Return the tokens of one planted copy of a canary: the canary's tokens with this copy's noise and shift.

    Equal arguments give an equal copy. Noise never inserts a special token, because a special token could end the
    document. If the noise draws a special token, the canary's own token stays.

    Args:
        tokens: The canary's tokens, without noise [length].
        canary: Index of the canary.
        copy: Index of the copy among the copies of this canary.
        canaries: Settings of the canaries. Only noise, shift, and seed are used.
        tokenizer: The tokenizer whose vocabulary random tokens come from.

    Returns:
        The tokens of the copy [length − shift of this copy].
    """
    chance = hash64(np.arange(len(tokens) + 1), int(hash64(canary * 1_000_003 + copy, canaries.seed)))
    start = int(chance[-1] % np.uint64(canaries.shift + 1))
    # The upper half of a hash decides whether a token is replaced. The lower half decides which token replaces it.
    others = ((chance[:-1] & np.uint64(0xFFFFFFFF)) % np.uint64(tokenizer.vocab_size)).astype(np.int64)
    replaced = (chance[:-1] >> np.uint64(32)) < np.uint64(canaries.noise * 2**32)
    replaced &= ~np.isin(others, tokenizer.special_ids)
    return np.where(replaced, others, tokens)[start:]


class CorpusPieces:
    """A corpus cut into pieces. Canaries are planted between pieces. By default, the canaries are the beginnings of
    some pieces, and these pieces are taken out of the corpus.

    If at least `wanted` documents have `length` or more tokens of text, each document is a piece. Otherwise, each
    document is cut into passages, and each passage is a piece. A passage has `length` tokens (more in a huge corpus).
    The last passage of a document also has the remaining tokens. A document that is too short for two passages stays
    whole.

    Args:
        corpus: The corpus to cut.
        length: Number of tokens per canary.
        wanted: Number of pieces that will become canaries.
    """

    def __init__(self, corpus: IndexedDataset, length: int, wanted: int) -> None:
        self._corpus = corpus
        self._offsets = corpus.document_offsets
        self._document_ends = self._offsets[1:]
        self.long = self._with_text_of(length)
        """Indices of the pieces with at least `length` tokens of text."""
        if len(self.long) < wanted:
            step = max(length, corpus.tokens // _MOST_PASSAGES)
            parts = np.maximum((np.diff(self._offsets) - 1) // step, 1)
            first = np.repeat(np.cumsum(parts) - parts, parts)
            begins = np.repeat(self._offsets[:-1], parts) + (np.arange(parts.sum()) - first) * step
            self._offsets = np.append(begins, corpus.tokens)
            self.long = self._with_text_of(length)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def beginning(self, piece: int, length: int) -> NDArray[np.int64]:
        """Return the first `length` tokens of a piece."""
        return self._corpus.read(int(self._offsets[piece]), length).astype(np.int64)

    def documents(self, pieces: NDArray[np.int64], eod_id: int) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """Make documents from some pieces.

        Pieces that follow each other in a document stay one document. If the end of a document is not among the pieces,
        an end-of-document token is added.

        Args:
            pieces: Indices of the pieces, ascending.
            eod_id: End-of-document token.

        Returns:
            The tokens of all documents, concatenated, and then the number of tokens of each document.
        """
        if len(pieces) == 0:
            return np.empty(0, self._corpus.dtype), np.empty(0, dtype=np.int64)
        parts, lengths = [], []
        for run in np.split(pieces, np.flatnonzero(np.diff(pieces) != 1) + 1):
            begin, end = int(self._offsets[run[0]]), int(self._offsets[run[-1] + 1])
            parts.append(self._corpus.read(begin, end - begin))
            first, last = np.searchsorted(self._document_ends, [begin, end], side="right")
            ends = self._document_ends[first:last]
            if len(ends) == 0 or ends[-1] != end:
                parts.append(np.array([eod_id], dtype=self._corpus.dtype))
                ends = np.append(ends, end + 1)
            lengths.append(np.diff(ends, prepend=begin))
        return np.concatenate(parts), np.concatenate(lengths)

    def _with_text_of(self, length: int) -> NDArray[np.int64]:
        # The end-of-document token is not text, so it does not count.
        ends_document = np.isin(self._offsets[1:], self._document_ends)
        return np.flatnonzero(np.diff(self._offsets) - ends_document >= length)


def plant(split: CorpusSplit, canaries: Canaries, tokenizer: Tokenizer, text_key: str, ledger: Path) -> CorpusSplit:
    """Write a copy of a corpus with canaries at random positions, and write the ledger. The canaries are between the
    pieces of the corpus (see `CorpusPieces`).

    Pieces that become canaries are taken out of the corpus. So a canary with 0 repeats occurs nowhere, unless the
    corpus has another copy of its text.

    Args:
        split: The corpus without canaries. The new corpus is written next to it.
        canaries: The canaries to plant.
        tokenizer: The tokenizer of the corpus.
        text_key: Key of the text in the rows of `canaries.source`.
        ledger: Path of the ledger to write.

    Returns:
        The new corpus, with its numbers of documents, tokens, and bytes.

    Raises:
        UserError: The source has too little text or cannot be read.
    """
    corpus = IndexedDataset(split.prefix)
    wanted = canaries.count * len(canaries.repeats)
    pieces = CorpusPieces(corpus, canaries.length, wanted if canaries.source is None else 0)
    documents, chosen = _sequences(pieces, canaries, wanted, tokenizer, text_key)
    rows = [
        {
            "id": number,
            "count": canaries.repeats[number // canaries.count],
            "text": tokenizer.decode(tokens.tolist()),
            "tokens": tokens.tolist(),
            **{key: getattr(canaries, key) for key in ("noise", "shift", "seed")},
            "tokenizer": tokenizer.fingerprint,
        }
        for number, tokens in enumerate(documents)
    ]
    planted = CorpusSplit(split.prefix.with_name(f"{split.prefix.name}-planted"), bytes=split.bytes)
    body = np.setdiff1d(np.arange(len(pieces)), chosen)
    copies = np.concatenate([np.full(row["count"], row["id"], dtype=np.int64) for row in rows])
    copy_numbers = np.concatenate([np.arange(row["count"], dtype=np.int64) for row in rows])
    order = np.argsort(hash64(np.arange(len(copies)), canaries.seed + 1), kind="stable")
    slots = np.sort(hash64(np.arange(len(copies)), canaries.seed + 2) % np.uint64(len(body) + 1)).astype(np.int64)
    with IndexedWriter(planted.prefix, tokenizer.vocab_size) as writer:
        done = 0
        for slot, which in zip(slots.tolist(), order.tolist(), strict=True):
            _add(writer, planted, *pieces.documents(body[done:slot], tokenizer.eod_id))
            done = slot
            row = rows[copies[which]]
            tokens = copy_of(documents[row["id"]], row["id"], int(copy_numbers[which]), canaries, tokenizer)
            _add(writer, planted, np.append(tokens, tokenizer.eod_id), np.array([len(tokens) + 1]))
            planted.bytes += len(row["text"].encode())
        _add(writer, planted, *pieces.documents(body[done:], tokenizer.eod_id))
    write_whole(ledger, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return planted


def _sequences(
    pieces: CorpusPieces, canaries: Canaries, wanted: int, tokenizer: Tokenizer, text_key: str
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Return the tokens of each canary in random order, and then the indices of the pieces that became canaries."""
    nothing = np.empty(0, dtype=np.int64)
    if canaries.source == RANDOM:
        text_ids = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)
        chance = hash64(np.arange(wanted * canaries.length), canaries.seed) % np.uint64(len(text_ids))
        return list(text_ids[chance.astype(np.int64)].reshape(wanted, canaries.length)), nothing
    if canaries.source is not None:
        found = []
        with given_as("--canaries-from"):
            for text in read_documents(canaries.source, text_key):
                (tokens,) = tokenizer.encode_batch([text])
                if len(tokens) >= canaries.length:
                    found.append(np.array(tokens[: canaries.length], dtype=np.int64))
        _check_enough(len(found), wanted, canaries, canaries.source)
        order = np.argsort(hash64(np.arange(len(found)), canaries.seed), kind="stable")[:wanted]
        return [found[number] for number in order.tolist()], nothing
    _check_enough(len(pieces.long), wanted, canaries, "the corpus")
    chosen = pieces.long[np.argsort(hash64(pieces.long, canaries.seed), kind="stable")[:wanted]]
    return [pieces.beginning(int(number), canaries.length) for number in chosen], chosen


def _check_enough(found: int, wanted: int, canaries: Canaries, where: str) -> None:
    if found < wanted:
        raise UserError(
            f"{where} has {found} documents or passages of at least {canaries.length} tokens, but {canaries.count} "
            f"canaries for each of {len(canaries.repeats)} numbers of repeats need {wanted}; lower --canaries or "
            "--canary-tokens"
        )


def _add(writer: IndexedWriter, split: CorpusSplit, tokens: NDArray[np.integer], lengths: NDArray[np.int64]) -> None:
    writer.add_documents(tokens, lengths)
    split.count(len(lengths), len(tokens))
