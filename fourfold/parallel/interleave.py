"""Parts of a micro-batch that take turns: while one computes, the collectives of the others run (Domino).

No sequence needs the hidden states of another, so that a block can take each of its steps for one part of the sequences
after the other (Wang et al. 2024, arXiv 2409.15241). The backward, and a block's recomputation, do the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from fourfold.models.transformer import MLP, AttentionContext, Block, Transformer
from fourfold.parallel.context import context_of_sequences
from fourfold.parallel.linear import Linear4D, LinearGroup
from fourfold.parallel.linear_steps import Steps, WeightGradientsLater
from fourfold.parallel.recompute import RECOMPUTES

T = TypeVar("T")


def interleave(model: Transformer, parts: int, multiple: int) -> None:
    """Run the blocks of a model, whose layers are on the grid, for parts of the sequences in turn.

    multiple: a part has a multiple of these sequences; batches that do not divide so are run whole.
    """
    for block in model.blocks:
        block.__class__ = InterleavedBlock
        vars(block).update(parts=parts, multiple=multiple)


class InterleavedBlock(Block):
    """A block whose collectives run while other parts of the micro-batch compute."""

    parts: int
    multiple: int

    def forward(self, x_BTh: Tensor, context: AttentionContext) -> Tensor:
        size, rest = divmod(len(x_BTh), self.parts)
        if rest or size % self.multiple:
            return super().forward(x_BTh, context)
        places = [slice(first, first + size) for first in range(0, len(x_BTh), size)]
        parts = zip(x_BTh.split(size), places, strict=True)
        return torch.cat(in_turn(self.steps(part, context_of_sequences(context, place)) for part, place in parts))

    def steps(self, x_BTh: Tensor, context: AttentionContext) -> Steps[Tensor]:
        """``Block.forward``, in steps that end where a collective has started."""
        qkv, o_proj, up, down_proj = self.self_attn.qkv, self.self_attn.o_proj, self.mlp.up, self.mlp.down_proj
        assert isinstance(qkv, LinearGroup) and isinstance(up, LinearGroup)
        assert isinstance(o_proj, Linear4D) and isinstance(down_proj, Linear4D)
        # Side by side, nothing makes attention's backward wait for the MLP's.
        is_summed = o_proj.writes.axis.size > 1 and not self.parallel_residual
        of_up = WeightGradientsLater(up.layers()) if is_summed else None
        q, k, v = yield from qkv.steps(self.input_layernorm(x_BTh))
        attended_BTh = x_BTh + (yield from o_proj.steps(self.self_attn.core(q, k, v, context), hidden_by=of_up))
        mlp_reads_BTh = x_BTh if self.parallel_residual else attended_BTh
        up_BSf = yield from up.steps(self.post_attention_layernorm(mlp_reads_BTh), later=of_up)
        if type(self.mlp).down is not MLP.down:  # it runs again in the backward, as a whole
            return attended_BTh + self.mlp.down(*up_BSf)
        # Nothing reads the output of a recomputed block: it ends when all parts have come to the last product.
        down_steps = down_proj.steps(self.mlp.activation(*up_BSf), pause=RECOMPUTES.get())
        out_BTh: Tensor = attended_BTh + (yield from down_steps)
        return out_BTh


def in_turn(workers: Iterable[Steps[T]]) -> list[T]:
    """Take one step of each, again and again; their results in the order in which they end."""
    waiting, results = deque(workers), list[T]()
    while waiting:
        worker = waiting.popleft()
        try:
            next(worker)
        except StopIteration as end:
            results.append(end.value)
        else:
            waiting.append(worker)
    return results
