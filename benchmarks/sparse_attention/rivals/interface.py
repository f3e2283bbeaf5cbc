"""The base class of sparse-attention methods. A method scores the cached keys, selects some of them, and attends to
them.

Every method makes one selection per KV head, for all query heads that share this KV head (a group). If each of the G
query heads of a group had its own selection, the group would read up to G times as many keys. If a paper has no rule
for groups, we sum the softmaxes of the group's query heads.

Shape letters: B sequences, K KV heads, G query heads per KV head, S keys, D head_dim, W last queries of the prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ACCUMULATOR_ELEMENTS = 2
"""Size of a float32 number, in elements of a cache in bf16."""


@dataclass(frozen=True)
class Prompt:
    """The state of one layer after the prompt, which was processed with dense attention."""

    key_BKSD: Tensor
    query_BKGWD: Tensor
    """Queries of the last tokens of the prompt."""
    mass_BKS: Tensor
    """Attention to each key, summed over all queries of the prompt and over the heads of the group."""
    scaling: float


@dataclass(frozen=True)
class Step:
    """The inputs of one layer's attention in one decoding step. The last key belongs to the current token."""

    layer: int
    query_BKGD: Tensor
    key_BKSD: Tensor
    value_BKSD: Tensor
    scaling: float

    @property
    def length(self) -> int:
        """Return the number of cached keys."""
        return self.key_BKSD.shape[2]

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.key_BKSD.shape[3]


class Rival(ABC):
    """A sparse-attention method. It also counts how many elements of the cache it reads."""

    def __init__(self) -> None:
        self.read, self.dense = 0.0, 0.0

    def start(self, prompts: Sequence[Prompt]) -> None:
        """Prepare for decoding after a prompt, and set the counts to zero. ``prompts`` has the prompt's state in each
        layer."""
        self.read, self.dense = 0.0, 0.0

    @abstractmethod
    def score(self, step: Step) -> Tensor | None:
        """Return how much each key is worth, [B, K, S], or None if the method's choice does not depend on the query."""

    @abstractmethod
    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        """Return a mask [B, K, S] that is True for the keys to attend to."""

    def attend(self, step: Step, chosen_BKS: Tensor) -> Tensor:
        """Return the output of attention to the chosen keys, [B, K, G, D]."""
        return torch.matmul(weights_of(step, chosen_BKS), step.value_BKSD)

    def scoring_elements(self, step: Step) -> float:
        """Return how many elements of the cache ``score`` and ``select`` read in this step, for each KV head."""
        return 0.0

    def decode(self, step: Step) -> Tensor:
        """Run the step, and count the elements of the cache that it reads. Return the output of attention."""
        chosen_BKS = self.select(step, self.score(step))
        kept = chosen_BKS.sum().item() / chosen_BKS[..., 0].numel()
        self.read += self.scoring_elements(step) + 2 * kept * step.head_dim
        self.dense += 2 * step.length * step.head_dim
        return self.attend(step, chosen_BKS)

    @property
    def share(self) -> float:
        """Return the number of elements read since ``start``, as a share of the elements that dense attention reads."""
        return self.read / self.dense


def scores_of(step: Step) -> Tensor:
    """Return the exact scores, [B, K, G, S]."""
    return torch.matmul(step.query_BKGD * step.scaling, step.key_BKSD.transpose(-1, -2))


def weights_of(step: Step, chosen_BKS: Tensor) -> Tensor:
    """Return the softmax of the exact scores over the chosen keys, [B, K, G, S]."""
    return torch.softmax(scores_of(step).masked_fill(~chosen_BKS[:, :, None], float("-inf")), -1)


def top_mask(worth_BKS: Tensor, k: int) -> Tensor:
    """Return a mask that is True for the k largest numbers of each row."""
    best_BKk = worth_BKS.topk(min(k, worth_BKS.shape[-1]), -1).indices
    return torch.zeros_like(worth_BKS, dtype=torch.bool).scatter_(-1, best_BKk, True)
