"""Draw random token sequences for verification. Documents have random lengths, and the loss skips some tokens."""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.data.dataset import Windows, documents_of
from fourfold.data.goldfish import build_goldfish_mask
from fourfold.data.loader import Loader, MicroBatch
from fourfold.data.masks import LossMask, answers_only, document_boundary
from fourfold.parallel.grid.grid import Grid
from fourfold.training.corpora import micro_batches


class RandomSamples:
    """Random token samples for a loader. In a given run, each sample depends only on its index.

    The samples are as uneven as real data can be:

    - Sequences and micro-batches have very different numbers of labels in the loss (see ``kept``).
    - The vocabulary is divided into eighths, and one token in sixteen has the first or the last id of an eighth. The
      tensor-parallel axis x may split the vocabulary there.
    - Documents have random lengths. In every fourth sequence, several consecutive documents have only one token. In
      another fourth of the sequences, a document starts at each eighth of the sequence. The context-parallel axis cp
      may split the sequence there.
    - Every second sequence ends in padding, so the two answers of a preference pair (DPO) differ in length. With
      ``data.mask_documents``, every fourth sequence has a document of padding between its other documents.
    - If a step has more than three micro-batches, one of them has only sequences that repeat a single token. A few
      experts then get all tokens of this micro-batch, and all other experts get none.
    """

    def __init__(self, run: RunConfig) -> None:
        training = run.training
        self.seq_length, self.vocab_size = training.seq_length, run.model.vocab_size
        eighths = np.arange(9) * (run.model.padded_vocab_size // 8)
        self.borders = np.union1d(eighths - 1, eighths).clip(0, self.vocab_size - 1)
        self.batch, self.micro_batch = training.global_batch_size, training.micro_batch_size
        self.beta, self.pads_inside = run.dpo.beta, run.data.mask_documents
        self.goldfish = build_goldfish_mask(run.masks.goldfish, (), training.seq_length, training.global_batch_size)
        self.look_back = 0 if self.goldfish is None else self.goldfish.look_back

    @property
    def masks(self) -> list[LossMask]:
        """Return the masks for a loader of these samples."""
        masks: list[LossMask] = [document_boundary, answers_only]
        return masks if self.goldfish is None else [*masks, self.goldfish]

    def read(self, numbers: ArrayLike) -> Windows:
        """Return the samples with these indices. ``Windows.answers`` marks the labels that are in the loss."""
        numbers = np.asarray(numbers, dtype=np.int64)
        length = self.look_back + self.seq_length + 1
        generators = [np.random.default_rng((1, number)) for number in numbers]
        tokens = np.stack([self._tokens(generator, length) for generator in generators])
        is_repeated = self._is_micro_batch(numbers, 3) if self.batch // self.micro_batch > 3 else np.zeros_like(numbers)
        tokens = np.where(is_repeated[:, None], tokens[:, :1], tokens)
        documents = self._documents(numbers, generators, length)
        is_padding = self._is_padding(numbers, documents[:, self.look_back :])
        tokens[:, self.look_back :][is_padding] = 0
        kept = self.kept(numbers) & ~is_padding[:, 1:]
        answers = np.concatenate([~kept[:, :1], kept], axis=1)  # The first token is never a target.
        return Windows(tokens, documents, numbers, self.look_back, answers, self._reference(numbers, kept), ~is_padding)

    def kept(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Choose at random which labels are in the loss, as bool [samples, S]. In addition, padding and the masks of
        the run file may drop labels.

        The share of labels in the loss falls from 1 in the first sequence of a batch to 1/20 in the last sequence. Two
        micro-batches are special, and their positions change from step to step:
            - If a batch has several micro-batches, one of them has no labels at all.
            - If a batch has more than two micro-batches, one of them has labels only in the last eighth of its
              sequences. So some cp or x ranks have no label. A faulty rank that averages over its own labels only would
              divide by zero.

        If a batch has only two or three micro-batches, one of them has all its labels, so no step is empty.
        """
        shares = 1 - 0.95 * (numbers % self.batch) / max(1, self.batch - 1)
        drawn = [np.random.default_rng((2, number)).random(self.seq_length) for number in numbers]
        found: NDArray[np.bool_] = np.stack(drawn) < shares[:, None]
        count = self.batch // self.micro_batch
        if count > 2:
            found[self._is_micro_batch(numbers, 2)] = np.arange(self.seq_length) >= self.seq_length * 7 // 8
        if count > 1:
            found[self._is_micro_batch(numbers, 1)] = False
        if count in (2, 3):
            found[self._is_micro_batch(numbers, 0)] = True
        return found

    def _tokens(self, generator: np.random.Generator, length: int) -> NDArray[np.int64]:
        anywhere, borders = generator.integers(self.vocab_size, size=length), generator.choice(self.borders, length)
        return np.where(generator.random(length) < 1 / 16, borders, anywhere)

    def _is_micro_batch(self, numbers: NDArray[np.int64], place: int) -> NDArray[np.bool_]:
        """Return for each sample whether it is in the micro-batch with index (``place`` + s) mod n of its step. Here s
        is the index of the step, and n is the number of micro-batches in a step."""
        step, micro_batch = numbers // self.batch, numbers % self.batch // self.micro_batch
        found: NDArray[np.bool_] = micro_batch == (step + place) % (self.batch // self.micro_batch)
        return found

    def _documents(
        self, numbers: NDArray[np.int64], generators: list[np.random.Generator], length: int
    ) -> NDArray[np.int64]:
        """Return the document index of each token, with about four documents per sequence. The first token after the
        look-back tokens is in document 0."""
        is_start = np.stack([generator.random(length) < 4 / self.seq_length for generator in generators])
        ones = slice(self.look_back + self.seq_length // 2, self.look_back + self.seq_length * 5 // 8)
        is_start[numbers % 4 == 2, ones] = True
        eighths = self.look_back + np.arange(1, 8) * self.seq_length // 8
        is_start[np.ix_(numbers % 4 == 3, eighths)] = True
        documents = documents_of([np.flatnonzero(row) for row in is_start], length)
        return documents - documents[:, self.look_back, None]

    def _is_padding(self, numbers: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Choose which tokens of each window are padding, as bool [samples, S + 1]. The function changes ``documents``
        in place: the padding at the end of a window becomes a separate document."""
        most = self.seq_length + 1
        data = np.array([np.random.default_rng((4, number)).integers(most // 2, most + 1) for number in numbers])
        is_end = (numbers % 2 == 1)[:, None] & (np.arange(most) >= data[:, None])
        documents[is_end] = self.seq_length
        is_inside = (numbers % 4 == 0)[:, None] & (documents == 1) & self.pads_inside
        found: NDArray[np.bool_] = is_end | is_inside
        return found

    def _reference(self, numbers: NDArray[np.int64], kept: NDArray[np.bool_]) -> NDArray[np.float32] | None:
        """Return a random log-probability under the DPO reference model for each sample, or None without DPO. It is
        close to the log-probability under an untrained model, so no DPO margin is far from zero."""
        if not self.beta:
            return None
        even = -np.log(self.vocab_size) * kept.sum(1)
        drawn = [np.random.default_rng((3, number)).normal() for number in numbers]
        found: NDArray[np.float32] = (even + np.array(drawn) / self.beta).astype(np.float32)
        return found


def random_micro_batches(run: RunConfig, step: int, grid: Grid, device: torch.device) -> list[MicroBatch[Tensor]]:
    """Return the micro-batches of random samples that this process gets in one step. Samples are divided among the
    processes as in training."""
    samples, training = RandomSamples(run), run.training
    sizes = (training.seq_length, training.global_batch_size, training.micro_batch_size)
    depths = run.model.num_nextn_predict_layers
    loader = Loader(samples, *sizes, grid.batch.rank, grid.batch.size, samples.masks, depths=depths)
    return micro_batches(loader.step(step), run, grid.cp, device)
