"""Methods that remove keys from the cache for good: StreamingLLM, H2O, and SnapKV. Only H2O reads memory in each step
to choose keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from benchmarks.sparse_attention.rivals.interface import (
    ACCUMULATOR_ELEMENTS,
    Prompt,
    Rival,
    Step,
    top_mask,
    weights_of,
)


class StreamingLLM(Rival):
    """Keep the first and the last keys (arXiv 2309.17453). A key's position is its place in the cache, not in the text.

    Args:
        k: Number of keys.
        sink: Number of first keys (4 in the paper).
        inverse_frequencies: Angles of the rotary embedding per position, [D / 2].
    """

    def __init__(self, k: int, sink: int, inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.k, self.sink, self.inverse_frequencies = k, min(sink, k - 1), inverse_frequencies

    def score(self, step: Step) -> None:
        return None

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        places_S = torch.arange(step.length)
        kept_S = (places_S < self.sink) | (places_S >= step.length - (self.k - self.sink))
        return kept_S.expand(step.key_BKSD.shape[:3])

    def attend(self, step: Step, chosen_BKS: Tensor) -> Tensor:
        """Attend as if the last keys directly followed the first keys."""
        moved = max(0, step.length - self.k)
        key_BKSD = step.key_BKSD.clone()
        key_BKSD[:, :, : self.sink] = rotated(key_BKSD[:, :, : self.sink], moved, self.inverse_frequencies)
        return super().attend(Step(step.layer, step.query_BKGD, key_BKSD, step.value_BKSD, step.scaling), chosen_BKS)


def rotated(x_BKSD: Tensor, places: int, inverse_frequencies: Tensor) -> Tensor:
    """Return keys with positions that are larger by ``places``: turn their rotary embedding (half-split layout)
    further."""
    angles = torch.cat([inverse_frequencies, inverse_frequencies]) * places
    first, second = x_BKSD.chunk(2, -1)
    return x_BKSD * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class H2O(Rival):
    """Keep the last keys, and the keys that got the most attention so far (arXiv 2306.14048).

    After each step, each KV head removes one key from its cache: the key that got the least attention. It never removes
    one of the last ``recent`` keys.

    Args:
        k: Number of keys that a step reads.
        recent: How many of the last keys are never removed (half of k in the paper).
    """

    def __init__(self, k: int, recent: int) -> None:
        super().__init__()
        self.k, self.recent = k, recent
        self.mass: list[Tensor] = []
        self.alive: list[Tensor] = []

    def start(self, prompts: Sequence[Prompt]) -> None:
        super().start(prompts)
        self.mass = [prompt.mass_BKS.clone() for prompt in prompts]
        self.alive = [self._survivors(mass_BKS, torch.ones_like(mass_BKS, dtype=torch.bool)) for mass_BKS in self.mass]

    def _survivors(self, mass_BKS: Tensor, alive_BKS: Tensor) -> Tensor:
        """Return a mask of the keys that stay in the cache. These are k - 1 keys, because the next step adds a key."""
        worth_BKS = mass_BKS.masked_fill(~alive_BKS, float("-inf"))
        worth_BKS[..., -self.recent :] = float("inf")
        return top_mask(worth_BKS, self.k - 1) & alive_BKS

    def score(self, step: Step) -> None:
        return None

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        self.alive[step.layer] = pad(self.alive[step.layer], (0, 1), value=True)
        return self.alive[step.layer]

    def attend(self, step: Step, chosen_BKS: Tensor) -> Tensor:
        weights_BKGS = weights_of(step, chosen_BKS)
        self.mass[step.layer] = pad(self.mass[step.layer], (0, 1)) + weights_BKGS.sum(2)
        self.alive[step.layer] = self._survivors(self.mass[step.layer], chosen_BKS)
        return torch.matmul(weights_BKGS, step.value_BKSD)

    def scoring_elements(self, step: Step) -> float:
        return ACCUMULATOR_ELEMENTS * self.k


class SnapKV(Rival):
    """Keep the prompt's keys that its last queries attend to most, and all keys after the prompt (arXiv 2404.14469).

    Args:
        k: Number of keys of the prompt to keep, including the window.
        window: Number of last tokens of the prompt whose queries choose the keys (32 in the paper). The keys of these
            tokens are always kept.
        kernel: Width of the average pooling of the attention, over neighboring keys (5 in the authors' code).
    """

    def __init__(self, k: int, window: int, kernel: int = 5) -> None:
        super().__init__()
        self.k, self.window, self.kernel = k, window, kernel
        self.kept: list[Tensor] = []

    def start(self, prompts: Sequence[Prompt]) -> None:
        super().start(prompts)
        self.kept = [self._vote(prompt) for prompt in prompts]

    def _vote(self, prompt: Prompt) -> Tensor:
        query_BKGWD = prompt.query_BKGWD[..., -self.window :, :]
        rows, length = query_BKGWD.shape[-2], prompt.key_BKSD.shape[2]
        scores_BKGWS = torch.matmul(query_BKGWD * prompt.scaling, prompt.key_BKSD.transpose(-1, -2)[:, :, None])
        hidden_WS = torch.ones(rows, length, dtype=torch.bool).triu(length - rows + 1)
        weights_BKGWS = torch.softmax(scores_BKGWS.masked_fill(hidden_WS, float("-inf")), -1)
        votes_BKS = weights_BKGWS[..., : length - rows].sum((2, 3))
        pooled_BKS = avg_pool1d(votes_BKS, self.kernel, 1, self.kernel // 2)
        return pad(top_mask(pooled_BKS, self.k - rows), (0, rows), value=True)

    def score(self, step: Step) -> None:
        return None

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        kept_BKS = self.kept[step.layer]
        return pad(kept_BKS, (0, step.length - kept_BKS.shape[-1]), value=True)
