"""Define the samples of a run: cut each corpus into windows, shuffle the windows, and mix several corpora."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fourfold.data.indexed import IndexedDataset
from fourfold.data.order import hash64, sample_permutation
from fourfold.errors import UserError

BLOCK = 10_000
"""Number of samples in a block of a mixture. A source contributes the same number of samples to every block."""

NO_DOCUMENT = -(2**31)
"""Document index of positions before the first token of a corpus or conversation."""


@dataclass(frozen=True)
class Windows:
    """A batch of samples, and the information about them that the masks need. Each sample is a window of the token
    stream, with some earlier tokens (the look-back)."""

    stream: NDArray[np.int64]
    """Tokens [samples, look_back + seq_length + 1]. The first `look_back` tokens of a row are only for masks. The model
    never reads them."""
    stream_documents: NDArray[np.int64]
    """Index of each token's document, in the same shape as `stream`. The first token of the window is in document 0,
    and earlier documents have negative indices."""
    numbers: NDArray[np.int64]
    """Index of each sample in the order of training [samples]."""
    look_back: int = 0
    answers: NDArray[np.bool_] | None = None
    """Whether each token belongs to a trained answer of a conversation [samples, seq_length + 1]. None for plain
    text."""
    reference: NDArray[np.float32] | None = None
    """Log-probability of each answer under the reference model [samples]. None without preference optimization."""
    is_data: NDArray[np.bool_] | None = None
    """False for padding [samples, seq_length + 1]. None if there is no padding."""

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Return the tokens of the samples without the look-back [samples, seq_length + 1]."""
        return self.stream[:, self.look_back :]

    @property
    def documents(self) -> NDArray[np.int64]:
        """Return the document index of each token of the samples [samples, seq_length + 1]."""
        return self.stream_documents[:, self.look_back :]


class Samples(Protocol):
    """An endless sequence of samples. Sample n depends only on n."""

    seq_length: int
    look_back: int

    def read(self, numbers: ArrayLike) -> Windows:
        """Read the samples with these indices (int [B], from 0), in this order."""
        ...


class TokenWindows:
    """The corpus at `prefix`, cut into windows of `seq_length` + 1 tokens.

    Window i starts at token i·seq_length. Neighboring windows share one token, so every token of the windows except the
    very first is predicted once. Tokens at the end that do not fill a window are not used.

    Sample n is one window. Epoch n // len(self) visits all windows in its own order, drawn from `seed`. Each sample
    also has the `look_back` tokens before its window, for masks.

    Raises:
        UserError: The corpus is shorter than one window, or a file is missing or damaged.
    """

    def __init__(self, prefix: str | Path, seq_length: int, seed: int, look_back: int = 0) -> None:
        self.corpus = corpus = IndexedDataset(prefix)
        if corpus.tokens <= seq_length:
            remedy = f"seq_length {corpus.tokens - 1} is the longest that works" if corpus.tokens > 1 else "add text"
            raise UserError(
                f"{corpus.prefix}.bin has {corpus.tokens} tokens, fewer than the {seq_length + 1} of one window of"
                f" seq_length {seq_length}; {remedy}"
            )
        self.seq_length, self.seed, self.look_back = seq_length, seed, look_back

    def __len__(self) -> int:
        """Return the number of windows in one epoch."""
        return (self.corpus.tokens - 1) // self.seq_length

    def read(self, numbers: ArrayLike) -> Windows:
        """Read the samples with these indices (int [B], from 0), in this order."""
        numbers = np.asarray(numbers, dtype=np.int64)
        epoch, within = np.divmod(numbers, len(self))
        windows = sample_permutation(within, len(self), self.seed, epoch)
        length = self.look_back + self.seq_length + 1
        tokens = np.zeros((len(windows), length), dtype=np.int64)
        document_starts, missing = [], []
        for row, window in enumerate(windows.tolist()):
            start = window * self.seq_length - self.look_back
            # The look-back of the first windows begins before the first token of the corpus. `absent` is the number of
            # positions that have no token.
            absent = max(0, -start)
            tokens[row, absent:] = self.corpus.read(start + absent, length - absent)
            document_starts.append(absent + self.corpus.document_starts(start + absent, length - absent))
            missing.append(absent)
        return windows_of(tokens, document_starts, missing, numbers, self.look_back)


class SourceMixture:
    """A mixture of the samples of several sources, in fixed proportions.

    The number n alone determines sample n: which source it comes from, and its index in that source. Samples come in
    blocks of 10,000. In each block, the proportions are exact to 1 in 10,000, and a seeded arrangement spreads each
    source evenly over the block. So shorter ranges of samples have nearly these proportions too. When a source runs
    out, it starts again in another order.

    Args:
        sources: Each source with its weight. Only the ratios of the weights matter.
        seed: Seed of the arrangement.

    Raises:
        UserError: There is no source, a weight is not a positive finite number, or a weight is so small that its source
            gets no sample in a block.
    """

    def __init__(self, sources: Sequence[tuple[Samples, float]], seed: int) -> None:
        if not sources:
            raise UserError("a mixture needs at least one source")
        self.sources = [source for source, _ in sources]
        self.seq_length, self.look_back = self.sources[0].seq_length, self.sources[0].look_back
        cuts = {(source.seq_length, source.look_back) for source in self.sources}
        assert len(cuts) == 1, f"sources cut to different lengths: {cuts}"
        self.counts = _share_out([weight for _, weight in sources])
        self._source, self._rank = _arrange(self.counts, seed)

    def read(self, numbers: ArrayLike) -> Windows:
        """Read the samples with these indices (int [B], from 0), in this order."""
        numbers = np.asarray(numbers, dtype=np.int64)
        block, place = np.divmod(numbers, BLOCK)
        source = self._source[place]
        own_number = block * self.counts[source] + self._rank[place]
        rows = [np.flatnonzero(source == index) for index in range(len(self.sources))]
        parts = [each.read(own_number[own]) for each, own in zip(self.sources, rows, strict=True) if len(own)]
        # `mixed` concatenates the samples source by source. This index restores the order of `numbers`.
        order = np.argsort(np.concatenate(rows))

        def mixed(field: str) -> Any:
            """Return a field of all samples, or None if the sources lack this field. All sources have the same
            data.format, so either all sources have the field or none."""
            found = [getattr(windows, field) for windows in parts]
            return None if found[0] is None else np.concatenate(found)[order]

        stream, documents = mixed("stream"), mixed("stream_documents")
        optional = (mixed(field) for field in ("answers", "reference", "is_data"))
        return Windows(stream, documents, numbers, self.look_back, *optional)


def windows_of(
    stream: NDArray[np.int64],
    document_starts: Sequence[NDArray[np.int64]],
    missing: Sequence[int],
    numbers: NDArray[np.int64],
    look_back: int,
) -> Windows:
    """Build windows from tokens.

    Args:
        stream: Tokens [samples, look_back + seq_length + 1].
        document_starts: For each row, the indices in that row at which documents start.
        missing: For each row, the number of positions at its start that lie before the first token of the corpus.
        numbers: Index of each sample [samples].
        look_back: Number of extra tokens before each window. Only masks read these tokens.
    """
    length = stream.shape[1]
    documents = documents_of(document_starts, length)
    documents -= documents[:, look_back, None]
    documents[np.arange(length) < np.array(missing)[:, None]] = NO_DOCUMENT
    return Windows(stream, documents, numbers, look_back)


def documents_of(starts: Sequence[NDArray[np.int64]], length: int) -> NDArray[np.int64]:
    """Number the documents of each window, starting from 0.

    Args:
        starts: For each window, the indices at which documents start, in any order. Repeats are allowed.
        length: Number of tokens per window.

    Returns:
        Index of each token's document [len(starts), length].
    """
    is_start = np.zeros((len(starts), length), dtype=np.int64)
    for row, places in enumerate(starts):
        is_start[row, places] = 1
    is_start[:, 0] = 0  # The first document has index 0, even if it started before the window.
    return is_start.cumsum(axis=1)


def positions_of(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each token's position in its document, given the index of each token's document. Both are [rows, length].

    Positions in the first document are relative to the start of the window.
    """
    places = np.arange(documents.shape[1])
    is_start = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    positions: NDArray[np.int64] = places - np.maximum.accumulate(np.where(is_start, places, 0), axis=1)
    return positions


def _share_out(weights: Sequence[float]) -> NDArray[np.int64]:
    """Return each source's number of samples in a block, by the largest-remainder method. The counts add up to
    BLOCK."""
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"source {index + 1} of the mixture has weight {weight}; a weight must be positive")
    # Divide by the largest weight first. The sum of huge weights could be infinite.
    shares = np.array(weights) / max(weights)
    ideal = shares / shares.sum() * BLOCK
    counts: NDArray[np.int64] = np.floor(ideal).astype(np.int64)
    by_remainder = np.argsort(counts - ideal, kind="stable")
    counts[by_remainder[: BLOCK - counts.sum()]] += 1
    if (counts == 0).any():
        index = int((counts == 0).argmax())
        raise UserError(
            f"source {index + 1} of the mixture has weight {weights[index]} of {sum(weights)} in total, which gives no"
            f" sample in {BLOCK}; raise the weight, or leave the source out"
        )
    return counts


def _arrange(counts: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each position in a block, and how many earlier positions of the block have the same source.
    Both arrays are [BLOCK]."""
    source = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    # If a source has c samples in the block, divide the block into c equal parts, and put sample k at a random position
    # of part k.
    jitter = hash64(np.arange(BLOCK), seed) / 2.0**64
    order = np.argsort((rank + jitter) / counts[source], kind="stable")
    return source[order], rank[order]
