"""Numbered samples: a corpus cut into windows and shuffled, and a mixture of such corpora."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fourfold.data.indexed import IndexedDataset
from fourfold.data.order import hash64, sample_permutation
from fourfold.errors import UserError

BLOCK = 10_000  # samples over which a mixture's proportions are exact


NO_DOCUMENT = -(2**31)  # the document of places before the first token of a corpus


@dataclass(frozen=True)
class Windows:
    """Windows of the token stream, the input of masks."""

    stream: NDArray[np.int64]
    """[samples, look_back + seq_length + 1]: the tokens, and those before them, which only masks see."""
    stream_documents: NDArray[np.int64]
    """The document of each token, counted from 0 at the window's first one; those before have negative numbers."""
    numbers: NDArray[np.int64]
    """[samples]: their numbers in the order of training."""
    look_back: int = 0
    answers: NDArray[np.bool_] | None = None
    """[samples, seq_length + 1]: the tokens of conversations that belong to an answer; None for text."""
    reference: NDArray[np.float32] | None = None
    """[samples]: the log-probabilities that the reference of preference optimization gives the answers."""
    is_data: NDArray[np.bool_] | None = None
    """[samples, seq_length + 1]: false for padding. None: there is no padding."""

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[samples, seq_length + 1]"""
        return self.stream[:, self.look_back :]

    @property
    def documents(self) -> NDArray[np.int64]:
        """[samples, seq_length + 1]"""
        return self.stream_documents[:, self.look_back :]


class Samples(Protocol):
    """An endless sequence of samples: sample n is a pure function of n."""

    seq_length: int
    look_back: int

    def read(self, numbers: ArrayLike) -> Windows:
        """Read the samples of these numbers (int [B], from 0), in this order."""
        ...


class TokenWindows:
    """One corpus as windows of `seq_length` + 1 tokens: window i starts at token i·seq_length, so that neighbors
    share one token and every token but the first is predicted once. A remainder shorter than a window is left out.

    Sample n is a window: epoch n // len(self) visits all of them in an order of its own, drawn from `seed`. `look_back`
    tokens before each are read too, for masks.

    Raises UserError if the corpus is shorter than one window.
    """

    def __init__(self, corpus: IndexedDataset, seq_length: int, seed: int, look_back: int = 0) -> None:
        if corpus.tokens <= seq_length:
            remedy = f"seq_length {corpus.tokens - 1} is the longest that works" if corpus.tokens > 1 else "add text"
            raise UserError(
                f"{corpus.prefix}.bin has {corpus.tokens} tokens, fewer than the {seq_length + 1} of one window of"
                f" seq_length {seq_length}; {remedy}"
            )
        self.corpus = corpus
        self.seq_length = seq_length
        self.seed = seed
        self.look_back = look_back

    @classmethod
    def open(cls, prefix: str | Path, seq_length: int, seed: int, look_back: int = 0) -> Self:
        return cls(IndexedDataset(prefix), seq_length, seed, look_back)

    def __len__(self) -> int:
        """Windows in one epoch."""
        return (self.corpus.tokens - 1) // self.seq_length

    def read(self, numbers: ArrayLike) -> Windows:
        """Read the samples of these numbers (int [B], from 0), in this order."""
        numbers = np.asarray(numbers, dtype=np.int64)
        epoch, within = np.divmod(numbers, len(self))
        windows = sample_permutation(within, len(self), self.seed, epoch)
        length = self.look_back + self.seq_length + 1
        tokens = np.zeros((len(windows), length), dtype=np.int64)
        document_starts, missing = [], []
        for row, window in enumerate(windows.tolist()):
            start = window * self.seq_length - self.look_back
            absent = max(0, -start)  # places before the first token of the corpus
            tokens[row, absent:] = self.corpus.read(start + absent, length - absent)
            document_starts.append(absent + self.corpus.document_starts(start + absent, length - absent))
            missing.append(absent)
        return windows_of(tokens, document_starts, missing, numbers, self.look_back)


class SourceMixture:
    """Several sources in fixed proportions: n alone decides which source gives sample n, and which of its samples.

    Weights are relative. In every block of 10,000 samples their proportions are exact (to 1 in 10,000), and a
    seeded arrangement spreads each source evenly over the block, so that any stretch comes close to them too. A source
    that is used up starts again in another order.

    Raises UserError for no source, a weight that is not a positive number, or one that rounds to no sample.
    """

    def __init__(self, sources: Sequence[tuple[Samples, float]], seed: int) -> None:
        if not sources:
            raise UserError("a mixture of no sources gives no samples; name at least one source")
        self.sources = [source for source, _ in sources]
        self.seq_length, self.look_back = self.sources[0].seq_length, self.sources[0].look_back
        cuts = {(source.seq_length, source.look_back) for source in self.sources}
        assert len(cuts) == 1, f"sources cut to different lengths: {cuts}"
        self.counts = _share_out([weight for _, weight in sources])
        self._source, self._rank = _arrange(self.counts, seed)

    def read(self, numbers: ArrayLike) -> Windows:
        """Read the samples of these numbers (int [B], from 0), in this order."""
        numbers = np.asarray(numbers, dtype=np.int64)
        block, place = np.divmod(numbers, BLOCK)
        source = self._source[place]
        own_number = block * self.counts[source] + self._rank[place]
        stream = np.empty((len(place), self.look_back + self.seq_length + 1), dtype=np.int64)
        documents = np.empty_like(stream)
        answers = np.ones((len(place), self.seq_length + 1), dtype=bool)
        reference: NDArray[np.float32] | None = None
        is_data: NDArray[np.bool_] | None = None
        for index in np.unique(source):
            rows = np.flatnonzero(source == index)
            windows = self.sources[index].read(own_number[rows])
            stream[rows] = windows.stream
            documents[rows] = windows.stream_documents
            answers[rows] = True if windows.answers is None else windows.answers
            if windows.reference is not None:
                reference = np.empty(len(place), dtype=np.float32) if reference is None else reference
                reference[rows] = windows.reference
            if windows.is_data is not None:  # then every source pads, because data.format is one for all sources
                is_data = np.empty_like(answers) if is_data is None else is_data
                is_data[rows] = windows.is_data
        return Windows(stream, documents, numbers, self.look_back, answers, reference, is_data)


def windows_of(
    stream: NDArray[np.int64],
    document_starts: Sequence[NDArray[np.int64]],
    missing: Sequence[int],
    numbers: NDArray[np.int64],
    look_back: int,
) -> Windows:
    """Windows from their tokens, the places in each row where documents start, and the places before the first token.

    stream: [samples, look_back + seq_length + 1].
    """
    length = stream.shape[1]
    documents = documents_of(document_starts, length)
    documents -= documents[:, look_back, None]
    documents[np.arange(length) < np.array(missing)[:, None]] = NO_DOCUMENT
    return Windows(stream, documents, numbers, look_back)


def documents_of(starts: Sequence[NDArray[np.int64]], length: int) -> NDArray[np.int64]:
    """[len(starts), length]: 0, 1, 2 … within each window, given where documents start in it (any order, repeats)."""
    is_start = np.zeros((len(starts), length), dtype=np.int64)
    for row, places in enumerate(starts):
        is_start[row, places] = 1
    is_start[:, 0] = 0  # the first document is number 0, whether it starts at the window or before it
    return is_start.cumsum(axis=1)


def positions_of(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """[rows, length]: each token's place in its document, counted from the window's start in the first one."""
    places = np.arange(documents.shape[1])
    is_start = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    positions: NDArray[np.int64] = places - np.maximum.accumulate(np.where(is_start, places, 0), axis=1)
    return positions


def _share_out(weights: Sequence[float]) -> NDArray[np.int64]:
    """Samples of each source in a block, by largest remainder; their sum is BLOCK."""
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"source {index + 1} of the mixture has weight {weight}; a weight is a positive number")
    shares = np.array(weights) / max(weights)  # their sum is finite
    ideal = shares / shares.sum() * BLOCK
    counts: NDArray[np.int64] = np.floor(ideal).astype(np.int64)
    by_remainder = np.argsort(counts - ideal, kind="stable")
    counts[by_remainder[: BLOCK - counts.sum()]] += 1
    if (counts == 0).any():
        index = int((counts == 0).argmax())
        raise UserError(
            f"source {index + 1} of the mixture has weight {weights[index]} of {sum(weights)} in all, which gives no"
            f" sample in {BLOCK}; raise it or leave the source out"
        )
    return counts


def _arrange(counts: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[BLOCK] twice: the source at each place of a block, and how many of its samples came before in the block."""
    source = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    # The k-th of c samples falls at random within the k-th c-th part of the block.
    jitter = hash64(np.arange(BLOCK), seed) / 2.0**64
    order = np.argsort((rank + jitter) / counts[source], kind="stable")
    return source[order], rank[order]
