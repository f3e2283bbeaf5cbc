"""Parts of a micro-batch that take turns: while one computes, the collectives of the others run (Domino).

No sequence needs the hidden states of another, so that a block can take each of its steps for one part of the sequences
after the other (Wang et al. 2024, arXiv 2409.15241). Where they are too few, parts are tokens of all sequences, which
need each other in the attention alone. The backward, and a block's recomputation, do the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fourfold.config.layout import AttentionSplit
from fourfold.models.causal_attention import AttentionContext
from fourfold.models.mlp import MLP
from fourfold.models.transformer import Block, Transformer, normed
from fourfold.parallel.context import context_of_sequences
from fourfold.parallel.grid import Grid
from fourfold.parallel.linear import Linear4D, LinearGroup
from fourfold.parallel.linear_steps import Steps, Until, WeightGradientsLater
from fourfold.parallel.recompute import RECOMPUTES

T = TypeVar("T")


def interleave(model: Transformer, parts: int, split: AttentionSplit, grid: Grid) -> None:
    """Run the blocks of a model, whose layers are on the grid, for parts of a micro-batch in turn.

    split: how y shares the attention. A batch that does not divide into parts is run whole.
    """
    multiple, ranks = (grid.y.size, grid.x.size) if split == "batch" else (1, 1)
    for block in model.blocks:
        block.__class__ = InterleavedBlock
        vars(block).update(parts=parts, runs_ahead=grid.y.size == 1)
        vars(block).update(multiple=multiple, by_tokens=split != "sequence", token_ranks=ranks)


class InterleavedBlock(Block):
    """A block whose collectives run while other parts of the micro-batch compute."""

    parts: int
    multiple: int
    """A part has a multiple of these sequences."""
    by_tokens: bool
    """Parts may be tokens of all sequences."""
    runs_ahead: bool
    """Parts may be at different steps. With y, most collectives would then run behind the products of one part only."""
    token_ranks: int
    """Ranks that share the tokens of the residual stream, where attention reads them sequence by sequence."""

    def forward(self, x_BTh: Tensor, context: AttentionContext) -> Tensor:
        sequences, tokens = x_BTh.shape[:2]
        if sequences % (self.parts * self.multiple) == 0:
            size = sequences // self.parts
            places = [slice(first, first + size) for first in range(0, sequences, size)]
            parts = zip(x_BTh.split(size), places, strict=True)
            workers = [self.steps(part, context_of_sequences(context, place)) for part, place in parts]
            return torch.cat(in_turn(workers, self.runs_ahead))
        if self.by_tokens and tokens % self.parts == 0:
            joined = JoinedAttention(lambda q, k, v: self.self_attn.core(q, k, v, context), self.token_ranks)
            workers = [self.steps(part, context, joined) for part in x_BTh.split(tokens // self.parts, 1)]
            return torch.cat(in_turn(workers, self.runs_ahead), 1)
        return super().forward(x_BTh, context)

    def steps(self, x_BTh: Tensor, context: AttentionContext, joined: JoinedAttention | None = None) -> Steps[Tensor]:
        """``Block.forward``, in steps that end where a collective has started.

        joined: the attention of all parts, where each has only some tokens of its sequences.
        """
        assert isinstance(self.mlp, MLP), "parts do not take turns where there are experts"
        qkv, o_proj, up, down_proj = self.self_attn.qkv, self.self_attn.o_proj, self.mlp.up, self.mlp.down_proj
        assert isinstance(qkv, LinearGroup) and isinstance(up, LinearGroup)
        assert isinstance(o_proj, Linear4D) and isinstance(down_proj, Linear4D)
        # Side by side, nothing makes attention's backward wait for the MLP's.
        is_summed = o_proj.writes.axis.size > 1 and not self.parallel_residual
        of_up = WeightGradientsLater(up.layers()) if is_summed else None
        q, k, v = yield from qkv.steps(normed(x_BTh, self.input_layernorm))
        if joined is None:
            heads = self.self_attn.core(q, k, v, context)
        else:
            joined.give(q, k, v)
            yield Until.OTHERS
            heads = joined.take()
        o_proj_steps = o_proj.steps(heads, hidden_by=of_up, before_gather=True)
        attended_BTh = x_BTh + normed((yield from o_proj_steps), self.attention_output_layernorm)
        mlp_reads_BTh = x_BTh if self.parallel_residual else attended_BTh
        up_BSf = yield from up.steps(normed(mlp_reads_BTh, self.post_attention_layernorm), later=of_up)
        if type(self.mlp).down is not MLP.down:  # it runs again in the backward, as a whole
            return attended_BTh + normed(self.mlp.down(*up_BSf), self.mlp_output_layernorm)
        # Where no norm reads it, nothing does: a recomputed block ends when all parts have come to the last product.
        ends_early = RECOMPUTES.get() and self.mlp_output_layernorm is None
        down_steps = down_proj.steps(self.mlp.activation(*up_BSf), pause=ends_early)
        mlp_BTh = yield from down_steps
        return attended_BTh + normed(mlp_BTh, self.mlp_output_layernorm)


class JoinedAttention:
    """The attention of whole sequences, whose tokens come and go in parts, [B, ranks · t, features].

    ranks: each sequence of a part has t tokens from every one of so many ranks, one rank's after the other's.
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], ranks: int) -> None:
        self._attend, self._ranks = attend, ranks
        self._given: list[tuple[Tensor, Tensor, Tensor]] = []
        self._attended = deque[Tensor]()

    def give(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add the next part."""
        self._given.append((q, k, v))

    def take(self) -> Tensor:
        """The output of the next part, once all have been given."""
        if not self._attended:
            parts, given = len(self._given), zip(*self._given, strict=True)
            self._given = []
            q, k, v = (
                torch.stack([t.unflatten(1, (self._ranks, -1)) for t in each], 2).flatten(1, 3) for each in given
            )
            whole = self._attend(q, k, v).unflatten(1, (self._ranks, parts, -1))
            self._attended.extend(part.flatten(1, 2).contiguous() for part in whole.unbind(2))
        return self._attended.popleft()


@dataclass(eq=False)
class _Part(Generic[T]):
    steps: Steps[T]
    until: Until | None = None
    """Condition for its next step; None if it can go on at once."""
    products: int = -1
    """Steps with products that all parts together had taken when its last step ended."""


def in_turn(workers: Iterable[Steps[T]], runs_ahead: bool) -> list[T]:
    """Run all parts step by step, the part that has waited longest first; returns their results, in the same order.

    runs_ahead: prefer parts for which another has computed a product since they began to wait, and of these one that is
    about to gather, so that products hide its gather too.
    """
    waiting, results, products = [_Part(steps) for steps in workers], list[T](), 0
    while waiting:
        if all(part.until is Until.OTHERS for part in waiting):
            for part in waiting:
                part.until = None
        part = _next(waiting, products) if runs_ahead else waiting[0]
        waiting.remove(part)
        has_input = part.until is Until.GATHERED
        try:
            part.until = next(part.steps)
        except StopIteration as end:
            results.append(end.value)
        else:
            waiting.append(part)
        if has_input or part.until in (Until.SUMMED, Until.SUMMED_TO_GATHER):
            products += 1
        part.products = products
    return results


def _next(waiting: list[_Part[T]], products: int) -> _Part[T]:
    able = [part for part in waiting if part.until is not Until.OTHERS]
    ready = [part for part in able if part.products < products or part.until is None]
    to_gather = [part for part in ready if part.until is Until.SUMMED_TO_GATHER]
    return (to_gather or ready or able)[0]
