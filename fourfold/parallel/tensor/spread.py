"""Describe how the ranks of an axis hold a tensor: in shares or as copies. Run the collectives that gather the whole
tensor or sum partial tensors."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parallel.grid.communicate import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from fourfold.parallel.grid.grid import Axis

Tensors = tuple[Tensor, ...]
Wait = Callable[[], Tensors]
"""A function that waits for collectives in flight and returns their results."""


class Spread(NamedTuple):
    """Says how tensors are spread over the ranks of an axis.

    Each rank holds its share along ``dim``. If ``dim`` is None, each rank holds a copy of the whole tensor. With
    shares, ``start_sums`` and ``start_gathers`` run a single collective for all tensors of a call.
    """

    axis: Axis
    dim: int | None

    def start_gather(self, share: Tensor, why: str) -> Pending:
        """Start to gather the whole tensor from the ranks' shares."""
        return Pending(share) if self.dim is None else start_all_gather(share, self.axis, self.dim, why)

    def start_sum(self, partial: Tensor, why: str) -> Pending:
        """Start to sum partial tensors. Each rank gets its share of the sum, or the whole sum if ``dim`` is None."""
        if self.dim is None:
            return start_all_reduce(partial, self.axis, why)
        return start_reduce_scatter(partial, self.axis, self.dim, why)

    def start_sums(self, compute: Sequence[Callable[[], Tensor]], why: str, overlap: bool) -> Wait:
        """Compute partial tensors, and start to sum each over the ranks.

        Args:
            compute: one function per tensor [..., features].
            overlap: whether to compute a tensor while the previous tensor is summed. This has no effect if the ranks
                hold shares, because one collective then sums all tensors.
        """
        if self.dim is None or self.axis.size == 1:
            sums: list[Pending] = []
            for partial in compute:
                if sums and not overlap:
                    sums[-1] = Pending(sums[-1].wait())
                sums.append(start_all_reduce(partial(), self.axis, why))
            return lambda: tuple(each.wait() for each in sums)
        partials = [partial() for partial in compute]
        sizes = [partial.shape[-1] for partial in partials]
        if self.dim < 2:
            started = start_reduce_scatter(_joined(partials), self.axis, self.dim, why)
            return lambda: started.wait().split(sizes, -1)
        ranks = self.axis.size
        started = start_reduce_scatter(
            _joined([each.unflatten(-1, (ranks, -1)) for each in partials]), self.axis, 2, why
        )
        return lambda: started.wait().squeeze(2).split([size // ranks for size in sizes], -1)

    def start_gathers(self, shares: Sequence[Tensor], why: str) -> Wait:
        """Start to gather whole tensors [..., features] from the ranks' shares."""
        if self.dim is None or self.axis.size == 1:
            return lambda: tuple(shares)
        sizes = [share.shape[-1] for share in shares]
        if self.dim < 2:
            started = start_all_gather(_joined(shares), self.axis, self.dim, why)
            return lambda: started.wait().split(sizes, -1)
        started = start_all_gather(_joined(shares).unsqueeze(2), self.axis, 2, why)
        return lambda: tuple(part.flatten(2) for part in started.wait().split(sizes, -1))

    def share_shape(self, whole: Sequence[int]) -> list[int]:
        """Return the shape of one rank's share of a tensor with the shape ``whole``."""
        return [size // self.axis.size if dim == self.dim else size for dim, size in enumerate(whole)]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along the last dim."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), -1)
