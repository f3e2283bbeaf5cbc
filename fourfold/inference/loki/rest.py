"""Replace all keys that are not chosen (the rest) by one key, whose value is the mean of the replaced keys' values.

If the rest were left out, attention that spreads over many keys would lose most of these keys. SparQ (arXiv
2312.04985, section 3) also adds a mean value.

Shape letters: B sequences, K KV heads, S keys, D head_dim. A k at the end of a name stands for the chosen keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LAST = 32
"""The sum in ``ValueSum`` leaves out the last tokens: at least ``LAST`` and at most 2 · ``LAST`` − 1 of them."""


def share_of_chosen(
    exact_k: Tensor, coded_k: Tensor, is_chosen_k: Tensor, coded_S: Tensor, is_rest_S: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the fraction of the attention weight that the chosen keys get, and then the log-sum-exp of all scores.
    Both keep the last dim, with size 1.

    The scores of the codes lack a constant, which is the same for all keys. Estimate it from the chosen keys, because
    their exact scores are known.

    Args:
        exact_k: Exact scores of the chosen keys, in float32 or wider.
        coded_k: Scores of the chosen keys, computed from the keys' codes.
        is_chosen_k: False for keys in ``exact_k`` to ignore, because they are not chosen or not visible.
        coded_S: Scores of all keys, computed from the keys' codes.
        is_rest_S: True for visible keys that are not chosen.
    """
    lowest = torch.finfo(exact_k.dtype).min  # With −inf instead, gradients would be NaN if all keys were chosen.
    count = is_chosen_k.sum(-1, keepdim=True).clamp(min=1)
    constant = (exact_k - coded_k).masked_fill(~is_chosen_k, 0.0).sum(-1, keepdim=True) / count
    of_chosen = exact_k.masked_fill(~is_chosen_k, lowest).logsumexp(-1, keepdim=True)
    of_rest = coded_S.to(exact_k.dtype).masked_fill(~is_rest_S, lowest).logsumexp(-1, keepdim=True)
    share = torch.sigmoid(of_chosen - constant - of_rest)
    return share, torch.logaddexp(of_chosen, constant + of_rest)


class ValueSum:
    """The sum of the values that each sequence sees, without the values of the most recent tokens. So a decoding step
    only adds the values of these tokens, instead of summing all values again.

    The sum does not change if the cache drops a few of its last tokens, as speculative decoding does.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.sum_BKD: Tensor | None = None
        self.visible_B1S: Tensor | None = None
        """The mask that hid values when they were summed. None if no mask hid any."""
        self.summed = 0
        """Number of tokens in the sum."""
        self.cached = 0
        """Number of tokens in the cache at the most recent step, minus the tokens that the cache has dropped since."""

    @property
    def held_bytes(self) -> int:
        return 0 if self.sum_BKD is None else self.sum_BKD.nbytes

    def of(self, value_BKSD: Tensor, visible_B1S: Tensor | None) -> Tensor:
        """Return the sum of all values that each sequence sees, [B, K, D] in float32 or wider.

        Args:
            value_BKSD: All cached values.
            visible_B1S: True for keys that a sequence sees. None if every sequence sees all keys.
        """
        if self.sum_BKD is None or not self._has_summed(visible_B1S):
            self.clear()
            exact = torch.promote_types(value_BKSD.dtype, torch.float32)
            self.sum_BKD = value_BKSD.new_zeros(*value_BKSD.shape[:2], value_BKSD.shape[3], dtype=exact)
        self.cached = value_BKSD.shape[2]
        begin, end = self.summed, max(self.summed, (self.cached // LAST - 1) * LAST)
        self.sum_BKD = self.sum_BKD.to(value_BKSD.device)
        if end > begin:
            self.sum_BKD, self.summed = self.sum_BKD + _sum(value_BKSD, visible_B1S, begin, end), end
            self.visible_B1S = None if visible_B1S is None else visible_B1S[:, :, :end]
        return self.sum_BKD + _sum(value_BKSD, visible_B1S, end, self.cached)

    def _has_summed(self, visible_B1S: Tensor | None) -> bool:
        """Return whether the sum contains exactly the values that this mask shows."""
        if self.visible_B1S is None or visible_B1S is None:
            return self.summed == 0 or self.visible_B1S is visible_B1S
        return torch.equal(self.visible_B1S.to(visible_B1S.device), visible_B1S[:, :, : self.summed])

    def crop(self, count: int) -> None:
        """Account for a cache that drops its last ``count`` tokens. If the sum contains one of them, clear the sum."""
        self.cached -= count
        if self.cached < self.summed:
            self.clear()

    def select(self, indices: Tensor) -> None:
        """Keep only the sequences of the batch with these indices, in the given order."""
        self._each_row(lambda rows: rows[indices.to(rows.device)])

    def repeat(self, repeats: int) -> None:
        """Replace every sequence of the batch by ``repeats`` copies. Copies of a sequence are next to each other."""
        self._each_row(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device) -> None:
        self._each_row(lambda rows: rows.to(device))

    def _each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.sum_BKD is not None:
            self.sum_BKD = change(self.sum_BKD)
        if self.visible_B1S is not None:
            self.visible_B1S = change(self.visible_B1S)


def _sum(value_BKSD: Tensor, visible_B1S: Tensor | None, begin: int, end: int) -> Tensor:
    part_BKSD = value_BKSD[:, :, begin:end]
    if visible_B1S is not None:
        part_BKSD = part_BKSD.masked_fill(~visible_B1S[:, :, begin:end, None], 0.0)
    return part_BKSD.sum(2, dtype=torch.promote_types(value_BKSD.dtype, torch.float32))
