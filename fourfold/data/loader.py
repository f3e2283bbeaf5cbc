"""Choose the samples of a rank for each step, and assemble them into micro-batches."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fourfold.config.model import IGNORE_INDEX
from fourfold.data.dataset import Samples, positions_of
from fourfold.data.masks import LossMask, document_boundary, labels_of

Array = TypeVar("Array")
Other = TypeVar("Other")


@dataclass(frozen=True)
class MicroBatch(Generic[Array]):
    """The input of one forward pass: B sequences of S tokens. Fields are int64 [B, S] unless they say otherwise.

    The loader fills the fields with NumPy arrays. The training loop turns them into tensors.
    """

    tokens: Array
    labels: Array | None = None
    """Targets: the next token, or IGNORE_INDEX if the loss skips it. If this field is None, the model returns logits
    instead of the loss."""
    positions: Array | None = None
    """Position of each token in its document. None means that positions are relative to the start of the sequence."""
    document_ends: Array | None = None
    """For each document in a sequence, the index after its last token [B, E]. Attention does not cross these ends. The
    last end is S, and sequences with fewer than E documents repeat S. None means that attention sees the whole
    sequence."""
    reference: Array | None = None
    """Log-probability of each sequence's labels under the reference model, for preference optimization, float32 [B]."""
    is_data: Array | None = None
    """False for padding, bool [B, S]. Experts neither compute nor count padding. Prompts and masked tokens are data.
    None means that there is no padding."""
    next_tokens: Array | None = None
    """For multi-token prediction, int64 [B, S, D]: the D tokens after each token, or IGNORE_INDEX after the end of its
    document or sequence."""
    next_labels: Array | None = None
    """The label of each token in `next_tokens` [B, S, D], or IGNORE_INDEX if there is no such token."""

    def map(self, function: Callable[[Array], Other]) -> "MicroBatch[Other]":
        """Apply `function` to each field, and return a micro-batch of the results. Fields that are None stay None."""
        given: dict[str, Array] = {name: field for name, field in vars(self).items() if field is not None}
        return MicroBatch(**{name: function(field) for name, field in given.items()})


@dataclass(eq=False)
class Loader:
    """Builds this rank's micro-batches for any optimizer step.

    With global batch size G, step t consists of samples [t·G, (t+1)·G) on every grid. In this step, micro-batch m of
    rank r takes `micro_batch_size` samples, starting at t·G + (m·size + r)·micro_batch_size. The number of the step is
    the only state. To resume a run on any grid, call `step` with the next number.

    Args:
        dataset: The samples of all ranks and steps.
        seq_length: Number of tokens per sample.
        global_batch_size: Number of samples per step, over all ranks. A multiple of `micro_batch_size` times `size`.
        micro_batch_size: Number of samples per micro-batch.
        rank: This process's index among the ranks that split the batch. Ranks that compute with the same samples have
            the same index.
        size: Number of ranks that split the batch.
        masks: Masks of the loss. A token is in the loss if all masks keep it.
        prefetch: Whether a thread assembles step t + 1 while step t is used. `close` ends the thread.
        depths: Number of further tokens that the model predicts after the next token (multi-token prediction).
    """

    dataset: Samples
    seq_length: int
    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    size: int = 1
    masks: Sequence[LossMask] = (document_boundary,)
    prefetch: bool = False
    depths: int = 0

    def __post_init__(self) -> None:
        assert self.dataset.seq_length == self.seq_length, (self.dataset.seq_length, self.seq_length)
        assert 0 <= self.rank < self.size, (self.rank, self.size)
        self.micro_batches, left = divmod(self.global_batch_size, self.size * self.micro_batch_size)
        assert left == 0, (self.global_batch_size, self.size, self.micro_batch_size)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="loader") if self.prefetch else None
        self._ahead: tuple[int, Future[list[MicroBatch[NDArray[Any]]]]] | None = None

    def step(self, step: int) -> list[MicroBatch[NDArray[Any]]]:
        """Return the micro-batches of one optimizer step (the first step is 0), in execution order."""
        if self._executor is None:
            return self._assemble(step)
        ahead, self._ahead = self._ahead, None
        batches = ahead[1].result() if ahead is not None and ahead[0] == step else self._assemble(step)
        self._ahead = (step + 1, self._executor.submit(self._assemble, step + 1))
        return batches

    def sample_numbers(self, step: int) -> NDArray[np.int64]:
        """Return the global indices of this rank's samples in `step` [micro-batches, micro_batch_size]."""
        micro_batch = np.arange(self.micro_batches)[:, None]
        first = step * self.global_batch_size + (micro_batch * self.size + self.rank) * self.micro_batch_size
        return first + np.arange(self.micro_batch_size)

    def close(self) -> None:
        """End the prefetching thread if there is one. After this, `step` still works, but without prefetching."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = self._ahead = None

    def _assemble(self, step: int) -> list[MicroBatch[NDArray[Any]]]:
        return self.assemble(self.sample_numbers(step).reshape(-1))

    def assemble(self, numbers: NDArray[np.int64]) -> list[MicroBatch[NDArray[Any]]]:
        """Return the samples with these indices, in micro-batches."""
        windows = self.dataset.read(numbers)
        labels = labels_of(windows, self.masks)
        tokens = np.ascontiguousarray(windows.tokens[:, :-1])
        documents = np.ascontiguousarray(windows.documents[:, :-1])
        is_data = None if windows.is_data is None else np.ascontiguousarray(windows.is_data[:, :-1])
        ahead = [shifted(each, documents, self.depths) for each in (tokens, labels)] if self.depths else []
        positions = positions_of(documents)
        whole: MicroBatch[NDArray[Any]] = MicroBatch(
            tokens, labels, positions, None, windows.reference, is_data, *ahead
        )
        rows = [slice(begin, begin + self.micro_batch_size) for begin in range(0, len(tokens), self.micro_batch_size)]
        return [replace(whole.map(itemgetter(row)), document_ends=document_ends(documents[row])) for row in rows]


def shifted(values: NDArray[np.int64], documents: NDArray[np.int64], depths: int) -> NDArray[np.int64]:
    """Return the values of the next `depths` tokens after each token.

    Args:
        values: A value for each token [B, S].
        documents: Index of each token's document [B, S].
        depths: Number of tokens to look ahead.

    Returns:
        The values [B, S, depths], with IGNORE_INDEX after the end of the token's document or sequence.
    """
    found = np.full((*values.shape, depths), IGNORE_INDEX)
    for depth in range(1, depths + 1):
        is_same = documents[:, depth:] == documents[:, :-depth]
        found[:, :-depth, depth - 1] = np.where(is_same, values[:, depth:], IGNORE_INDEX)
    return found


def document_ends(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index after each document's last token, as `MicroBatch.document_ends` describes [B, E].

    Args:
        documents: Index of each token's document [B, S].
    """
    rows, length = documents.shape
    is_last = np.ones_like(documents, dtype=bool)
    is_last[:, :-1] = documents[:, 1:] != documents[:, :-1]
    counts = is_last.sum(1)
    ends = np.full((rows, counts.max()), length)
    for row in range(rows):
        ends[row, : counts[row]] = np.flatnonzero(is_last[row]) + 1
    return ends
