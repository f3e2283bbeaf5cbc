"""Documents of a stream in a shuffled order that can be continued from any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fourfold.data.order import sample_permutation
from fourfold.data.stream import DocumentStream


class ShuffledDocuments:
    """A stream whose documents are shuffled in blocks of ``size``, one after the other, each in an order of its own.

    Places of ``documents`` have their ``epoch``. A block ends at the end of an epoch, so that each epoch has every
    document once; with a size of all documents or more it is a shuffle of all. The order within a block is drawn from
    the seed and the block's number. So a place is that of the block, and a number in it; a buffer from which documents
    are drawn at random, as others have it, could not be continued without its content.
    """

    def __init__(self, documents: DocumentStream, size: int, seed: int) -> None:
        self._documents, self._size, self._seed = documents, size, seed

    def read(self, place: Any) -> Iterator[tuple[Any, str]]:
        """Yield each document after its place; None is the place of the first. A block is in memory as a whole."""
        begin, number, first = (None, 0, 0) if place is None else (place["block"], place["number"], place["next"])
        for block in self._blocks(begin):
            start = block[0][0]
            order = sample_permutation(np.arange(len(block)), len(block), self._seed, number).tolist()
            for at in range(first, len(block)):
                yield {"block": start, "number": number, "next": at}, block[order[at]][1]
            number, first = number + 1, 0

    def _blocks(self, begin: Any) -> Iterator[list[tuple[Any, str]]]:
        """Read the documents from a block's place on; a block is emptied before the next is read."""
        block: list[tuple[Any, str]] = []
        for place, text in self._documents.read(begin):
            if block and place["epoch"] != block[0][0]["epoch"]:
                yield block
                block.clear()
            block.append((place, text))
            if len(block) == self._size:
                yield block
                block.clear()
