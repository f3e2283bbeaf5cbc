"""Create the batches of the one-process reference. A batch holds all samples of a step. The labels and the positions
come from code that is independent of the loader."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.data.dataset import Samples, SourceMixture
from fourfold.verification.batches import RandomSamples
from fourfold.verification.random_corpora import are_answers, end_token
from fourfold.verification.reference_labels import kept_tokens, later_tokens, positions


@dataclass(frozen=True)
class Sequences:
    """The sequences of one step. ``kept_BS`` is True for targets in the loss. ``documents_BS`` has the index of each
    token's document, or is None if attention may cross documents."""

    tokens_BS: Tensor
    targets_BS: Tensor
    kept_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor | None = None
    reference_B: Tensor | None = None
    """In preference training ([dpo]), one number per sequence: the log-probability that the DPO reference model gives
    to the tokens in the loss. Otherwise None."""
    is_data_BS: Tensor | None = None
    """False for padding. None if there is no padding."""
    later_tokens_BSD: Tensor | None = None
    """The tokens that the D layers for multi-token prediction read (see ``later_tokens``). None if the model has no
    such layers. The next two fields have the tokens that these layers predict, and which of them are in the loss."""
    later_targets_BSD: Tensor | None = None
    later_kept_BSD: Tensor | None = None

    def part(self, rows: slice) -> Sequences:
        """Return only the sequences that ``rows`` selects."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[rows] for name, value in given.items() if value is not None})


def random_batch(run: RunConfig, step: int, device: torch.device) -> Sequences:
    """Return the batch of a step, made of parity's random samples."""
    return batch_of(RandomSamples(run), run, step, device)


def batch_of(samples: Samples, run: RunConfig, step: int, device: torch.device, steps: int = 1) -> Sequences:
    """Read the samples of one or several steps, and compute which of their labels are in the loss.

    Args:
        samples: The data set to read.
        run: The run. It sets the batch size and the masks of the loss.
        step: Index of the first step.
        device: The device of the tensors.
        steps: The number of steps.
    """
    size, apart, goldfish = run.training.global_batch_size, run.data.mask_documents, run.masks.goldfish
    windows = samples.read(np.arange(step * size, (step + steps) * size))
    # Find documents and answers from the tokens, because the loader itself may be faulty.
    if isinstance(samples, SourceMixture):
        is_end = windows.stream == end_token(run)
        windows = replace(windows, stream_documents=is_end.cumsum(axis=1) - is_end)
        if windows.is_data is not None:
            windows = replace(windows, answers=are_answers(windows.tokens) & windows.is_data)
    is_masked = goldfish.strategy != "none" and step >= goldfish.start_step
    kept_BS = kept_tokens(windows, goldfish, [is_masked] * len(windows.numbers))
    tokens = torch.from_numpy(windows.tokens).to(device)
    documents_BS = torch.from_numpy(windows.documents[:, :-1]).to(device)
    positions_BS = positions(documents_BS if apart else torch.zeros_like(documents_BS))
    optional = (windows.reference, None if windows.is_data is None else windows.is_data[:, :-1])
    reference_B, is_data_BS = (None if each is None else torch.from_numpy(each).to(device) for each in optional)
    within_BS, kept_BS = documents_BS if apart else None, kept_BS.to(device)
    own, depths = (tokens[:, :-1], tokens[:, 1:], kept_BS), run.model.num_nextn_predict_layers
    later = later_tokens(*own, documents_BS, depths) if depths else ()
    return Sequences(*own, positions_BS, within_BS, reference_B, is_data_BS, *later)
