"""Draw random samples for verification: documents of random lengths with some tokens left out of the loss."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.data.dataset import Windows, documents_of
from fourfold.data.goldfish import build_goldfish_mask
from fourfold.data.loader import Loader, MicroBatch
from fourfold.data.masks import LossMask, document_boundary
from fourfold.parallel.grid.grid import Grid
from fourfold.training.corpora import micro_batches


class RandomSamples:
    """Random token samples for a loader. Each sample is a function of its number alone.

    The labels that count are random too, and spread very unevenly (see ``kept``). With experts, up to half of a
    sequence is padding, because experts must not count padding.
    """

    def __init__(self, run: RunConfig) -> None:
        training = run.training
        self.seq_length, self.vocab_size = training.seq_length, run.model.vocab_size
        self.batch, self.micro_batch = training.global_batch_size, training.micro_batch_size
        self.beta, self.is_padded = run.dpo.beta, run.model.num_experts > 0
        self.goldfish = build_goldfish_mask(run.masks.goldfish, (), training.seq_length, training.global_batch_size)
        self.look_back = 0 if self.goldfish is None else self.goldfish.look_back

    @property
    def masks(self) -> list[LossMask]:
        """Return the masks for a loader of these samples."""
        masks: list[LossMask] = [document_boundary, lambda windows: self.kept(windows.numbers)]
        return masks if self.goldfish is None else [*masks, self.goldfish]

    def read(self, numbers: ArrayLike) -> Windows:
        """Return the samples with these numbers. Each holds about four documents."""
        length = self.look_back + self.seq_length + 1
        numbers = np.asarray(numbers, dtype=np.int64)
        generators = [np.random.default_rng((1, number)) for number in numbers]
        tokens = np.stack([generator.integers(self.vocab_size, size=length) for generator in generators])
        starts = [np.flatnonzero(generator.random(length) < 4 / self.seq_length) for generator in generators]
        documents = documents_of(starts, length)
        documents -= documents[:, self.look_back, None]
        if not self.is_padded:
            return Windows(tokens, documents, numbers, self.look_back, reference=self.reference(numbers))
        is_padding = np.arange(length) - self.look_back >= self.data_tokens(numbers)[:, None]
        tokens[is_padding] = 0
        documents[is_padding] = self.seq_length  # Padding is a separate document.
        is_data = ~is_padding[:, self.look_back :]
        return Windows(tokens, documents, numbers, self.look_back, None, self.reference(numbers), is_data)

    def data_tokens(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens before the padding of each window, [samples]."""
        most = self.seq_length + 1
        return np.array([np.random.default_rng((4, number)).integers(most // 2, most + 1) for number in numbers])

    def reference(self, numbers: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Return reference log-probabilities close to those of an untrained model, so that all margins are close to
        zero."""
        if not self.beta:
            return None
        even = -np.log(self.vocab_size) * self.kept(numbers).sum(1)
        drawn = [np.random.default_rng((3, number)).normal() for number in numbers]
        found: NDArray[np.float32] = (even + np.array(drawn) / self.beta).astype(np.float32)
        return found

    def kept(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the labels that no mask of the run file leaves out, [samples, S].

        In the first sequence of a batch all labels count, in the last only one in twenty. One micro-batch of each batch
        has no label at all. Another has labels only in the last eighth of its sequences, so some cp or x ranks have
        none, and a mean over a rank's own tokens would divide by zero. The two micro-batches change with every step, so
        no rank is spared. A batch of two or three micro-batches has one with all its labels, so no step is empty.
        """
        shares = 1 - 0.95 * (numbers % self.batch) / max(1, self.batch - 1)
        drawn = [np.random.default_rng((2, number)).random(self.seq_length) for number in numbers]
        found: NDArray[np.bool_] = np.stack(drawn) < shares[:, None]
        step, micro_batch = numbers // self.batch, numbers % self.batch // self.micro_batch
        count = self.batch // self.micro_batch
        if count > 2:
            found[micro_batch == (step + 2) % count] = np.arange(self.seq_length) >= self.seq_length * 7 // 8
        if count > 1:
            found[micro_batch == (step + 1) % count] = False
        if count in (2, 3):
            found[micro_batch == step % count] = True
        if self.is_padded:
            found &= np.arange(1, self.seq_length + 1) < self.data_tokens(numbers)[:, None]
        return found


def random_micro_batches(run: RunConfig, step: int, grid: Grid, device: torch.device) -> list[MicroBatch[Tensor]]:
    """Return this process's part of a step's random samples, cut the way training cuts its batches."""
    samples, training = RandomSamples(run), run.training
    sizes = (training.seq_length, training.global_batch_size, training.micro_batch_size)
    loader = Loader(samples, *sizes, grid.batch.rank, grid.batch.size, samples.masks)
    return micro_batches(loader.step(step), run, grid.cp, device)
