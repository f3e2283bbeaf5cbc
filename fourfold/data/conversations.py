"""Read the samples of a run that trains on conversations: windows packed with conversations, or pairs of answers to the
same prompt. A window is the tokens of one sample.

A conversation is never divided between windows. If it is longer than a window, its end is cut off. Conversations in the
same window cannot attend to each other.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fourfold.data.dataset import NO_DOCUMENT, Windows
from fourfold.data.indexed import IndexedDataset
from fourfold.data.manifest import corpus_tokenizer, trained_prefix
from fourfold.data.order import sample_permutation
from fourfold.errors import UserError


@dataclass(frozen=True)
class PackingStatistics:
    """Statistics on how a corpus of conversations was packed into windows."""

    windows: int
    conversations: int
    """Number of conversations in the windows."""
    filled: float
    """Fraction of the windows' tokens that belong to a conversation. The remaining tokens are padding."""
    cut: int
    """Number of conversations that are longer than a window. Their ends are cut off."""
    left_out: int
    """Number of conversations that are skipped, because none of their trained tokens would remain in the window."""


class ConversationCorpus:
    """A prepared corpus of conversations. Subclasses cut it into samples of `seq_length` + 1 tokens.

    Args:
        prefix: Path, without a suffix, of a corpus from `fourfold prepare --format sft` or `--format preferences`. Each
            conversation is one document. In a corpus of pairs, each answer with its prompt is one document.
        seq_length: Number of tokens of a sample that the model reads. The last token of a sample is only a target.
        seed: Seed of the order of samples.
        look_back: Number of padding tokens before each sample. Only masks read these tokens.

    Attributes:
        corpus: Tokens of the conversations.
        answers: For each token of `corpus`, a flag that says whether the token is trained.
        padding: Id of the token that fills the end of a sample.

    Raises:
        UserError: The tokens and the flags do not belong together, or a file is missing or damaged.
    """

    def __init__(self, prefix: str | Path, seq_length: int, seed: int, look_back: int = 0) -> None:
        self.padding = corpus_tokenizer(prefix).eod_id
        self.corpus, self.answers = IndexedDataset(prefix), IndexedDataset(trained_prefix(prefix))
        if (self.answers.tokens, self.answers.documents) != (self.corpus.tokens, self.corpus.documents):
            raise UserError(
                f"{self.answers.prefix}.bin does not belong to {self.corpus.prefix}.bin; prepare the corpus again"
            )
        self.seq_length, self.seed, self.look_back = seq_length, seed, look_back
        self._offsets = self.corpus.document_offsets

    def _fitting(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the length of each conversation, and whether at least one trained token is among the conversation's
        first `seq_length` + 1 tokens."""
        lengths = np.diff(self._offsets)
        return lengths, first_answers(self.answers, self._offsets) < np.minimum(lengths, self.seq_length + 1)

    def _filled(
        self, windows: Sequence[Sequence[int]], numbers: NDArray[np.int64], reference: NDArray[np.float32] | None = None
    ) -> Windows:
        """Fill each window with the conversations that `windows` lists for it, and then with padding. The padding is a
        separate document."""
        room = self.seq_length + 1
        stream = np.full((len(windows), self.look_back + room), self.padding, dtype=np.int64)
        documents = np.full_like(stream, NO_DOCUMENT)
        answers, is_data = (np.zeros((len(windows), room), dtype=bool) for _ in range(2))
        for row, window in enumerate(windows):
            place = 0
            for number, conversation in enumerate(window):
                start = int(self._offsets[conversation])
                length = min(int(self._offsets[conversation + 1]) - start, room)
                here = slice(place, place + length)
                stream[row, self.look_back :][here] = self.corpus.read(start, length)
                answers[row, here] = self.answers.read(start, length)
                documents[row, self.look_back :][here] = number
                place += length
            documents[row, self.look_back + place :] = len(window)
            is_data[row, :place] = True
        return Windows(stream, documents, numbers, self.look_back, answers, reference, is_data)


class PackedConversations(ConversationCorpus):
    """Windows of `seq_length` + 1 tokens, filled with conversations and padding.

    Each conversation is a document. The padding is a separate document and is never trained. Which conversations share
    a window depends only on `seq_length` and the lengths of the conversations.

    Sample n is one window. Epoch n // len(self) visits all windows in its own order, drawn from `seed`. Each sample
    also has `look_back` positions before its window, for masks. These positions hold padding, because nothing comes
    before a conversation.

    Raises:
        UserError: No conversation has a trained token within a window, or the corpus cannot be opened (see
            `ConversationCorpus`).
    """

    def __init__(self, prefix: str | Path, seq_length: int, seed: int, look_back: int = 0) -> None:
        super().__init__(prefix, seq_length, seed, look_back)
        room = seq_length + 1
        lengths, fits = self._fitting()
        kept = np.flatnonzero(fits)
        if len(kept) == 0:
            raise UserError(
                f"no conversation of {prefix}.bin has an answer within training.seq_length = {seq_length}; raise "
                "training.seq_length"
            )
        self._windows = [kept[window] for window in pack(np.minimum(lengths[kept], room), room)]
        self.statistics = PackingStatistics(
            windows=len(self._windows),
            conversations=len(kept),
            filled=float(np.minimum(lengths[kept], room).sum() / (len(self._windows) * room)),
            cut=int((lengths[kept] > room).sum()),
            left_out=len(lengths) - len(kept),
        )

    def __len__(self) -> int:
        """Return the number of windows in one epoch."""
        return len(self._windows)

    def read(self, numbers: ArrayLike) -> Windows:
        """Read the samples with these indices (int [B], from 0), in this order."""
        numbers = np.asarray(numbers, dtype=np.int64)
        epoch, within = np.divmod(numbers, len(self))
        windows = sample_permutation(within, len(self), self.seed, epoch)
        return self._filled([self._windows[window].tolist() for window in windows.tolist()], numbers)


class PreferencePairs(ConversationCorpus):
    """Windows of `seq_length` + 1 tokens. Each window holds one answer with its prompt, followed by padding, which is
    not trained.

    Samples 2n and 2n + 1 are the chosen and the rejected answer of a pair. With P pairs, this pair belongs to epoch
    n // P. Each epoch visits all pairs in its own order, drawn from `seed`. If an answer does not fit into the window,
    its end is cut off. A pair is skipped if the prompt of either answer fills the window.

    Raises:
        UserError: An answer has no pair, no pair fits, or the corpus cannot be opened (see `ConversationCorpus`).
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
                f"no pair of {prefix}.bin has both answers within training.seq_length = {seq_length}; raise "
                "training.seq_length"
            )
        self.left_out = len(kept) - len(self._pairs)
        self.cut = int((lengths[kept] > seq_length + 1).any(1).sum())
        self.reference: NDArray[np.float32] | None = None
        """Log-probability of each answer under the reference model [documents of the corpus]. None until the trainer
        has computed or loaded these values."""

    def __len__(self) -> int:
        """Return the number of samples in one epoch, two per pair."""
        return 2 * len(self._pairs)

    def documents_of(self, numbers: ArrayLike) -> NDArray[np.int64]:
        """Return which document of the corpus each sample reads, as indices. `numbers` are the samples' indices."""
        pairs, second = np.divmod(np.asarray(numbers, dtype=np.int64), 2)
        epoch, within = np.divmod(pairs, len(self._pairs))
        chosen: NDArray[np.int64] = 2 * self._pairs[sample_permutation(within, len(self._pairs), self.seed, epoch)]
        return chosen + second

    def read(self, numbers: ArrayLike) -> Windows:
        """Read the samples with these indices (int [B], from 0), in this order."""
        documents = self.documents_of(numbers)
        reference = None if self.reference is None else self.reference[documents]
        return self._filled(documents[:, None].tolist(), np.asarray(numbers, dtype=np.int64), reference)


def pack(lengths: Sequence[int] | NDArray[np.integer], room: int) -> list[NDArray[np.int64]]:
    """Pack items into bins with the best-fit method: go from the longest item to the shortest, and put each item into
    the fullest bin that has space for it.

    Args:
        lengths: Length of each item, at most `room`.
        room: Size of a bin.

    Returns:
        For each bin, the indices of its items.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    bins: list[list[int]] = []
    rest_of: dict[int, list[int]] = {}  # Maps an amount of free space to the bins with that much free space.
    rests: list[int] = []  # The keys of rest_of, in ascending order.
    for item in order.tolist():
        length = int(lengths[item])
        at = bisect_left(rests, length)
        if at == len(rests):
            chosen, rest = len(bins), room
            bins.append([])
        else:
            rest = rests[at]
            chosen = rest_of[rest].pop()
            if not rest_of[rest]:
                del rest_of[rest], rests[at]
        bins[chosen].append(item)
        rest -= length
        if rest > 0:
            if rest not in rest_of:
                rest_of[rest] = []
                insort(rests, rest)
            rest_of[rest].append(chosen)
    return [np.array(each, dtype=np.int64) for each in bins]


def first_answers(answers: IndexedDataset, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of the first trained token in each conversation. If no token is trained, return a number that
    is at least the length of the conversation.

    The first token of a conversation does not count, because it cannot be predicted from an earlier token.

    Args:
        answers: For each token, a flag that says whether the token is trained.
        offsets: Start of each conversation, followed by the end of the last conversation [conversations + 1].
    """
    trained = np.flatnonzero(answers.read(0, answers.tokens))
    trained = trained[~np.isin(trained, offsets)]
    next_trained = np.append(trained, np.iinfo(np.int64).max // 2)[np.searchsorted(trained, offsets[:-1])]
    return next_trained - offsets[:-1]
