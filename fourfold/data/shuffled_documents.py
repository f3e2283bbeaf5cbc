"""Shuffle the documents of a stream in an order that can be resumed from any document."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from fourfold.data.order import sample_permutation
from fourfold.data.stream import DocumentStream


class ShuffledDocuments:
    """A stream whose documents are shuffled within consecutive blocks of `size` documents.

    A block never crosses the end of an epoch, so each epoch has every document exactly once. If `size` is at least the
    number of documents, every epoch is fully shuffled.

    The seed and the number of a block determine the order within the block. So a checkpoint need not save any
    documents: it saves the start and the number of the block, and an index in the block.

    Args:
        documents: The stream to shuffle. The places that it yields are dictionaries with the key `epoch`.
        size: Number of documents per block.
        seed: Seed of the order.
    """

    def __init__(self, documents: DocumentStream, size: int, seed: int) -> None:
        self._documents, self._size, self._seed = documents, size, seed

    def read(self, place: Any) -> Iterator[tuple[Any, str]]:
        """Yield each document's place and text. The place says where the document is in the shuffled stream.

        This method holds one block in memory.

        Args:
            place: Place that an earlier call yielded. Reading begins with the document at this place. None begins with
                the first document.
        """
        begin, number, first = (None, 0, 0) if place is None else (place["block"], place["number"], place["next"])
        for block in self._blocks(begin):
            start = block[0][0]
            order = sample_permutation(np.arange(len(block)), len(block), self._seed, number).tolist()
            for at in range(first, len(block)):
                yield {"block": start, "number": number, "next": at}, block[order[at]][1]
            number, first = number + 1, 0

    def _blocks(self, begin: Any) -> Iterator[list[tuple[Any, str]]]:
        """Yield each block as a list of places and texts. The first block begins at the place `begin`. Each block is
        freed before the next block is read."""
        block: list[tuple[Any, str]] = []
        for place, text in self._documents.read(begin):
            if block and place["epoch"] != block[0][0]["epoch"]:
                yield block
                block.clear()
            block.append((place, text))
            if len(block) == self._size:
                yield block
                block.clear()
