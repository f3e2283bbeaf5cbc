"""Merge tokenized shards in input order, and hold out documents for validation."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fourfold.data.indexed import IndexedWriter
from fourfold.data.manifest import CorpusSplit
from fourfold.data.order import hash64
from fourfold.data.shards import Shard, open_result


def merge(
    shards: Sequence[Shard], folder: Path, vocab_size: int, validation_fraction: float, seed: int
) -> dict[str, CorpusSplit]:
    """Merge the completed shards in `folder` into one corpus in the same folder, or into two if documents are held out.

    The index of a document in the input and `seed` determine whether it is held out.

    Args:
        shards: The shards in input order.
        folder: Folder of the shards and of the result.
        vocab_size: Size of the vocabulary.
        validation_fraction: Approximate fraction of the documents to hold out.
        seed: Seed of the choice.

    Returns:
        The corpora "train" and, if `validation_fraction` > 0, "validation".
    """
    names = ("train", "validation") if validation_fraction > 0 else ("train",)
    splits = {name: CorpusSplit(folder / f"merged-{name}") for name in names}
    with ExitStack() as stack:
        writers = {name: stack.enter_context(IndexedWriter(split.prefix, vocab_size)) for name, split in splits.items()}
        seen = 0
        for shard in shards:
            corpus, text_bytes = open_result(shard, folder)
            offsets = corpus.document_offsets
            held_out = falls_within(np.arange(seen, seen + corpus.documents), validation_fraction, seed)
            seen += corpus.documents
            for begin, end in _runs(held_out):
                name = "validation" if held_out[begin] else "train"
                tokens = corpus.read(int(offsets[begin]), int(offsets[end] - offsets[begin]))
                writers[name].add_documents(tokens, corpus.lengths[begin:end])
                splits[name].count(end - begin, len(tokens), int(text_bytes[begin:end].sum()))
    return splits


def falls_within(numbers: NDArray[np.int64], share: float, seed: int) -> NDArray[np.bool_]:
    """Return whether each document is in a seeded random share of all documents.

    Args:
        numbers: Indices of the documents.
        share: The share, in [0, 1).
        seed: Seed of the choice.
    """
    return hash64(numbers, seed) < np.uint64(share * 2.0**64)


def _runs(values: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield the range [begin, end) of each run of equal values."""
    borders = np.flatnonzero(np.diff(values)) + 1
    edges = [0, *borders.tolist(), len(values)] if len(values) else []
    yield from pairwise(edges)
