"""Loads the micro-batches of one rank, a pure function of the step and the rank."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fourfold.data.dataset import Samples, positions_of
from fourfold.data.masks import LossMask, document_boundary, labels_of
from fourfold.errors import UserError

Array = TypeVar("Array")
Other = TypeVar("Other")


@dataclass(frozen=True)
class MicroBatch(Generic[Array]):
    """The input of one forward pass, int64 [B, S]: arrays from the loader, tensors on the way to the model."""

    tokens: Array
    labels: Array | None = None
    """The token after each, IGNORE_INDEX where the loss does not count it. Without labels the model returns logits."""
    positions: Array | None = None
    """The place of each token in its document; None: in its sequence."""
    document_ends: Array | None = None
    """[B, E]: where the documents of a sequence end, which attention must not cross: the last at S, repeated in
    sequences with fewer; None: it may."""
    reference: Array | None = None
    """[B], float32: the reference's log-probability of each sequence's labels, for preference optimization."""
    is_data: Array | None = None
    """[B, S], bool: false for padding, which experts neither compute nor count. Prompts and masked tokens are data.
    None: all tokens are data."""

    def map(self, function: Callable[[Array], Other]) -> "MicroBatch[Other]":
        """Apply ``function`` to every field that is not None."""

        def of(field: Array | None) -> Other | None:
            return None if field is None else function(field)

        others = (self.labels, self.positions, self.document_ends, self.reference, self.is_data)
        return MicroBatch(function(self.tokens), *map(of, others))


class Loader:
    """This rank's micro-batches for any optimizer step.

    Step t consists of samples [t·G, (t+1)·G) for global batch size G, whatever the grid; of these, micro-batch m of
    rank r of `size` takes the `micro_batch_size` that follow t·G + (m·size + r)·micro_batch_size. The step is the
    only state, so resuming, on this grid or another, is calling `step` with the next number.

    `rank`, `size` count the ranks that split the batch (not those that split a sequence or a layer). With `prefetch`
    one thread assembles step t + 1 while step t is used; `close` (or the end of a `with` block) ends it.

    Raises UserError if the global batch cannot be shared out evenly.
    """

    def __init__(
        self,
        dataset: Samples,
        seq_length: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        size: int = 1,
        masks: Sequence[LossMask] = (document_boundary,),
        prefetch: bool = False,
    ) -> None:
        assert dataset.seq_length == seq_length, (dataset.seq_length, seq_length)
        assert 0 <= rank < size, (rank, size)
        self.micro_batches = _micro_batches(global_batch_size, micro_batch_size, size)
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.size = size
        self.masks = tuple(masks)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="loader") if prefetch else None
        self._ahead: tuple[int, Future[list[MicroBatch[NDArray[Any]]]]] | None = None

    def step(self, step: int) -> list[MicroBatch[NDArray[Any]]]:
        """The micro-batches of optimizer step `step` (from 0), in the order in which they run."""
        if self._executor is None:
            return self._assemble(step)
        ahead, self._ahead = self._ahead, None
        batches = ahead[1].result() if ahead is not None and ahead[0] == step else self._assemble(step)
        self._ahead = (step + 1, self._executor.submit(self._assemble, step + 1))
        return batches

    def sample_numbers(self, step: int) -> NDArray[np.int64]:
        """[micro-batches, micro_batch_size]: the global numbers of the samples that `step` gives this rank."""
        micro_batch = np.arange(self.micro_batches)[:, None]
        first = step * self.global_batch_size + (micro_batch * self.size + self.rank) * self.micro_batch_size
        return first + np.arange(self.micro_batch_size)

    def close(self) -> None:
        """End the prefetching thread; without one, do nothing. The loader gives no more prefetched steps."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = self._ahead = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _assemble(self, step: int) -> list[MicroBatch[NDArray[Any]]]:
        return self.assemble(self.sample_numbers(step).reshape(-1))

    def assemble(self, numbers: NDArray[np.int64]) -> list[MicroBatch[NDArray[Any]]]:
        """The samples of these numbers in micro-batches."""
        windows = self.dataset.read(numbers)
        labels = labels_of(windows, self.masks)
        tokens = np.ascontiguousarray(windows.tokens[:, :-1])
        documents = np.ascontiguousarray(windows.documents[:, :-1])
        positions = positions_of(documents)
        rows = [slice(begin, begin + self.micro_batch_size) for begin in range(0, len(tokens), self.micro_batch_size)]
        reference, is_data = windows.reference, windows.is_data
        return [
            MicroBatch(
                tokens[row],
                labels[row],
                positions[row],
                document_ends(documents[row]),
                None if reference is None else reference[row],
                None if is_data is None else np.ascontiguousarray(is_data[row, :-1]),
            )
            for row in rows
        ]


def document_ends(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the documents of each sequence end, [B, E], from the document of each token, [B, S]."""
    rows, length = documents.shape
    is_last = np.ones_like(documents, dtype=bool)
    is_last[:, :-1] = documents[:, 1:] != documents[:, :-1]
    counts = is_last.sum(1)
    ends = np.full((rows, counts.max()), length)
    for row in range(rows):
        ends[row, : counts[row]] = np.flatnonzero(is_last[row]) + 1
    return ends


def _micro_batches(global_batch_size: int, micro_batch_size: int, size: int) -> int:
    """Return the number of micro-batches of each rank in a step."""
    if global_batch_size < 1 or micro_batch_size < 1:
        raise UserError(f"batch sizes are at least 1, not {global_batch_size} (global) and {micro_batch_size} (micro)")
    at_once = size * micro_batch_size
    count, rest = divmod(global_batch_size, at_once)
    if rest == 0:
        return count
    nearest = at_once * max(1, round(global_batch_size / at_once))
    raise UserError(
        f"global_batch_size {global_batch_size} is not a multiple of {at_once} ({size} ranks that split the batch"
        f" × micro_batch_size {micro_batch_size}); the nearest that works is {nearest}"
    )
