"""Read pairs of answers to one prompt. Each pair gives two samples: first the chosen answer, then the rejected one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fourfold.data.conversations import ConversationCorpus
from fourfold.data.dataset import Windows
from fourfold.data.order import sample_permutation
from fourfold.errors import UserError


class PreferencePairs(ConversationCorpus):
    """Windows of `seq_length` + 1 tokens. Each holds one answer with its prompt, followed by padding that is never
    trained.

    Samples 2n and 2n + 1 are the chosen and the rejected answer of a pair. Epoch n // pairs visits all pairs in its own
    order, drawn from `seed`. If an answer does not fit, its end is cut off. A pair is left out if one of its prompts
    fills the window.

    Raises:
        UserError: See `ConversationCorpus`, or no pair fits.
    """

    def __init__(self, prefix: str | Path, seq_length: int, seed: int, look_back: int = 0) -> None:
        assert look_back == 0, "the run file refuses a goldfish mask"
        super().__init__(prefix, seq_length, seed)
        if self.corpus.documents % 2:
            raise UserError(f"{prefix}.bin has an answer without its pair; prepare the corpus again")
        lengths, fits = (each.reshape(-1, 2) for each in self._fitting())
        kept = fits[:, 0] & fits[:, 1]
        self._pairs = np.flatnonzero(kept)
        if len(self._pairs) == 0:
            raise UserError(
                f"no pair of {prefix}.bin has both answers within training.seq_length = {seq_length}; raise it"
            )
        self.left_out = len(kept) - len(self._pairs)
        self.cut = int((lengths[kept] > seq_length + 1).any(1).sum())
        self.reference: NDArray[np.float32] | None = None
        """Log-probability of each answer under the reference model [documents of the corpus]. None until it is known.
        """

    def __len__(self) -> int:
        """Return the number of samples in one epoch, two per pair."""
        return 2 * len(self._pairs)

    def documents_of(self, numbers: ArrayLike) -> NDArray[np.int64]:
        """Return the index of each sample's document in the corpus."""
        pairs, second = np.divmod(np.asarray(numbers, dtype=np.int64), 2)
        epoch, within = np.divmod(pairs, len(self._pairs))
        chosen: NDArray[np.int64] = 2 * self._pairs[sample_permutation(within, len(self._pairs), self.seed, epoch)]
        return chosen + second

    def read(self, numbers: ArrayLike) -> Windows:
        """Read the samples with these indices (int [B], from 0), in this order."""
        documents = self.documents_of(numbers)
        stream = np.full((len(documents), self.seq_length + 1), self.padding, dtype=np.int64)
        is_data = np.zeros(stream.shape, dtype=bool)
        answers = np.zeros(stream.shape, dtype=bool)
        for row, document in enumerate(documents.tolist()):
            start = int(self._offsets[document])
            length = min(int(self._offsets[document + 1]) - start, self.seq_length + 1)
            stream[row, :length] = self.corpus.read(start, length)
            answers[row, :length] = self.answers.read(start, length)
            is_data[row, :length] = True
        reference = None if self.reference is None else self.reference[documents]
        numbers = np.asarray(numbers, dtype=np.int64)
        return Windows(stream, (~is_data).astype(np.int64), numbers, 0, answers, reference, is_data)
