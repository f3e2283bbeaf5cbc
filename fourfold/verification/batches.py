"""Random batches for verification: what training sees at its worst, a function of the step alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fourfold.config.model import IGNORE_INDEX
from fourfold.config.run import RunConfig
from fourfold.data.dataset import Windows, positions_of
from fourfold.data.goldfish import goldfish_mask
from fourfold.data.loader import MicroBatch
from fourfold.parallel.context import share_of_sequences
from fourfold.parallel.grid import Grid


def random_global_batch(run: RunConfig, step: int) -> MicroBatch[Tensor]:
    """The global batch of a step: random tokens, labels masked very unevenly over the sequences.

    With ``data.mask_documents`` each sequence is packed from documents of random lengths. A goldfish mask of the run
    file, from its start step on, masks the labels too.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    batch, length = run.training.global_batch_size, run.training.seq_length
    tokens = torch.randint(0, run.model.vocab_size, (batch, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    share_masked = torch.linspace(0, 0.95, batch)[:, None]
    labels[torch.rand(batch, length, generator=generator) < share_masked] = IGNORE_INDEX
    documents = torch.zeros_like(tokens)
    if run.data.mask_documents:
        starts = torch.rand(batch, length, generator=generator) < 4 / length
        starts[:, 0] = False
        documents[:, :length] = starts.cumsum(dim=1)
        documents[:, length] = documents[:, length - 1]
    goldfish = goldfish_mask(run.masks.goldfish, (), length, batch)
    if goldfish is not None:
        numbers = step * batch + np.arange(batch)
        kept = goldfish(Windows(tokens.numpy(), documents.numpy(), numbers))
        labels[~torch.from_numpy(kept)] = IGNORE_INDEX
    if not run.data.mask_documents:
        return MicroBatch(tokens[:, :-1], labels)
    positions = torch.from_numpy(positions_of(documents[:, :-1].numpy()))
    return MicroBatch(tokens[:, :-1], labels, positions, documents[:, :-1])


def micro_batches_of(
    batch: MicroBatch[Tensor], run: RunConfig, grid: Grid, device: torch.device
) -> list[MicroBatch[Tensor]]:
    """This process's micro-batches of a global batch, in the loader's order."""
    rank, ranks = grid.batch.rank, grid.batch.size
    size = run.training.micro_batch_size
    return [
        share_of_sequences(rows_of(batch, slice(first + rank * size, first + (rank + 1) * size), device), grid.cp)
        for first in range(0, len(batch.tokens), ranks * size)
    ]


def rows_of(batch: MicroBatch[Tensor], rows: slice, device: torch.device) -> MicroBatch[Tensor]:
    """Some sequences of a batch, on ``device``."""
    return batch.map(lambda field: field[rows].to(device))
