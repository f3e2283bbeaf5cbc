"""Parts of a micro-batch that take turns: while one computes, the collectives of the others run (Domino).

No sequence needs the hidden states of another, so that a block can take each of its steps for one part of the sequences
after the other (Wang et al. 2024, arXiv 2409.15241). Where they are too few, parts are tokens of all sequences, which
need each other in the attention alone. The backward, and a block's recomputation, do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fourfold.config.layout import AttentionSplit
from fourfold.config.model import LayerType
from fourfold.models.causal_attention import AttentionContext
from fourfold.models.mlp import MLP
from fourfold.models.transformer import Block, Transformer, normed
from fourfold.overlap_order import Steps, Until, in_turn
from fourfold.parallel.attention.context import context_of_sequences
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.memory.recompute import RECOMPUTES
from fourfold.parallel.tensor.linear import Linear4D, LinearGroup
from fourfold.parallel.tensor.linear_steps import PostponedGradients, Schedule, linear_steps


def interleave(model: Transformer, parts: int, split: AttentionSplit, grid: Grid, across_blocks: bool) -> None:
    """Run the blocks of a model, whose layers are on the grid, for parts of a micro-batch in turn.

    split: how y shares the attention; across_blocks: a part need not wait at the end of a block for the others. A batch
    that does not divide into parts is run whole.
    """
    multiple, ranks = (grid.y.size, grid.x.size) if split == "batch" else (1, 1)
    how = Parts(parts, multiple, split != "sequence", ranks, run_ahead=grid.y.size == 1)
    for block in model.blocks:
        block.__class__ = InterleavedBlock
        vars(block).update(parts=how)
    if across_blocks:
        model.__class__ = InterleavedTransformer
        vars(model).update(parts=how)


@dataclass(frozen=True)
class Parts:
    """How a micro-batch is divided."""

    number: int
    multiple: int
    """A part has a multiple of these sequences."""
    by_tokens: bool
    """Parts may be tokens of all sequences."""
    token_ranks: int
    """Ranks that share the tokens of the residual stream, where attention reads them sequence by sequence."""
    run_ahead: bool
    """Parts may be at different steps. With y, most collectives would then run behind the products of one part only."""

    def dim(self, x_BTh: Tensor) -> int | None:
        """The dim that is divided, that of sequences or of tokens; None if neither can be."""
        sequences, tokens = x_BTh.shape[:2]
        if sequences % (self.number * self.multiple) == 0:
            return 0
        return 1 if self.by_tokens and tokens % self.number == 0 else None

    def run(
        self, visits: Sequence[Visit], x_BTh: Tensor, dim: int, contexts: Mapping[LayerType, AttentionContext]
    ) -> Tensor:
        """Take all parts of ``dim`` through consecutive blocks."""
        size = x_BTh.shape[dim] // self.number
        if dim == 1:
            for visit in visits:
                core, context = visit.block.self_attn.core, contexts[visit.block.layer_type]
                visit.joined = JoinedAttention(core, context, self.token_ranks)

        def through(index: int, part_BTh: Tensor) -> Steps[Tensor]:
            own = contexts
            if dim == 0:
                place = slice(index * size, (index + 1) * size)
                own = {kind: context_of_sequences(context, place) for kind, context in contexts.items()}
            for visit in visits:
                part_BTh = visit.enter(part_BTh)
                steps = visit.block.steps(part_BTh, own[visit.block.layer_type], index, visit.joined, visit.is_last)
                part_BTh = yield from steps
                visit.leave(index, part_BTh)
            return part_BTh

        return torch.cat(in_turn(map(through, range(self.number), x_BTh.split(size, dim)), self.run_ahead), dim)


class InterleavedTransformer(Transformer):
    """A decoder in which parts of the micro-batch enter a block while others are in the one before."""

    parts: Parts

    def run_blocks(self, x_BTh: Tensor, contexts: Mapping[LayerType, AttentionContext]) -> Tensor:
        dim = self.parts.dim(x_BTh)
        if dim is None:
            return super().run_blocks(x_BTh, contexts)
        blocks = cast("list[InterleavedBlock]", self.blocks)
        visits = [HookedVisit(block, is_last=block is blocks[-1]) for block in blocks]
        return self.parts.run(visits, x_BTh, dim, contexts)


class InterleavedBlock(Block):
    """A block whose collectives run while other parts of the micro-batch compute."""

    parts: Parts

    def forward(self, x_BTh: Tensor, context: AttentionContext) -> Tensor:
        dim = self.parts.dim(x_BTh)
        if dim is None:
            return super().forward(x_BTh, context)
        return self.parts.run([Visit(self, is_last=True)], x_BTh, dim, {self.layer_type: context})

    def steps(
        self, x_BTh: Tensor, context: AttentionContext, index: int, joined: JoinedAttention | None, is_last: bool
    ) -> Steps[Tensor]:
        """``Block.forward`` of one part, in steps that end where a collective has started.

        joined: the attention of all parts, where each has only some tokens of its sequences; is_last: no other block
        reads the result at once.
        """
        assert isinstance(self.mlp, MLP), "parts do not take turns where there are experts"
        qkv, o_proj, up, down_proj = self.self_attn.qkv, self.self_attn.o_proj, self.mlp.up, self.mlp.down_proj
        assert isinstance(qkv, LinearGroup) and isinstance(up, LinearGroup)
        assert isinstance(o_proj, Linear4D) and isinstance(down_proj, Linear4D)
        # Side by side, nothing makes attention's backward wait for the MLP's.
        is_summed = o_proj.writes.axis.size > 1 and not self.parallel_residual
        of_up = PostponedGradients(up.layers()) if is_summed else None
        q, k, v = yield from linear_steps(normed(x_BTh, self.input_layernorm), qkv.layers(), Schedule())
        if joined is None:
            heads = self.self_attn.core(q, k, v, context)
        else:
            joined.give(index, q, k, v)
            yield Until.OTHERS
            heads = joined.take(index)
        o_proj_schedule = Schedule(gather_follows=True, computes_weight_gradients_of=of_up)
        (out_BTh,) = yield from linear_steps(heads, [o_proj], o_proj_schedule)
        attended_BTh = x_BTh + normed(out_BTh, self.attention_output_layernorm)
        mlp_reads_BTh = x_BTh if self.parallel_residual else attended_BTh
        mlp_input_BTh = normed(mlp_reads_BTh, self.post_attention_layernorm)
        up_schedule = Schedule(leaves_weight_gradients_to=of_up)
        up_BSf = yield from linear_steps(mlp_input_BTh, up.layers(), up_schedule)
        if type(self.mlp).down is not MLP.down:  # it runs again in the backward, as a whole
            return attended_BTh + normed(self.mlp.down(*up_BSf), self.mlp_output_layernorm)
        # Where no norm reads it, nothing does: a recomputed block ends when all parts have come to the last product.
        ends_early = RECOMPUTES.get() and self.mlp_output_layernorm is None
        down_schedule = Schedule(waits_before_matmul=ends_early, gather_follows=not is_last)
        (mlp_BTh,) = yield from linear_steps(self.mlp.activation(*up_BSf), [down_proj], down_schedule)
        return attended_BTh + normed(mlp_BTh, self.mlp_output_layernorm)


class JoinedAttention:
    """The attention of whole sequences, whose tokens come and go in parts, [B, ranks · t, features].

    ranks: each sequence of a part has t tokens from every one of so many ranks, one rank's after the other's.
    """

    def __init__(self, attend: Callable[..., Tensor], context: AttentionContext, ranks: int) -> None:
        self._attend, self._context, self._ranks = attend, context, ranks
        self._given: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._attended: dict[int, Tensor] = {}

    def give(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add a part."""
        self._given[index] = q, k, v

    def take(self, index: int) -> Tensor:
        """The output of a part, once all have been given."""
        if self._given:
            parts, given = len(self._given), zip(*(self._given[i] for i in sorted(self._given)), strict=True)
            self._given = {}
            q, k, v = (
                torch.stack([t.unflatten(1, (self._ranks, -1)) for t in each], 2).flatten(1, 3) for each in given
            )
            whole = self._attend(q, k, v, self._context).unflatten(1, (self._ranks, parts, -1))
            self._attended = {i: part.flatten(1, 2).contiguous() for i, part in enumerate(whole.unbind(2))}
        return self._attended.pop(index)


class Visit:
    """One block, as all parts pass it, called by its own forward.

    is_last: no other block gathers the result.
    """

    def __init__(self, block: InterleavedBlock, is_last: bool) -> None:
        self.block, self.is_last = block, is_last
        self.joined: JoinedAttention | None = None

    def enter(self, x_BTh: Tensor) -> Tensor:
        """The input of the next part."""
        return x_BTh

    def leave(self, index: int, x_BTh: Tensor) -> None:
        """Note the output of a part."""


class HookedVisit(Visit):
    """One block that is not called: its hooks run when the first part enters, and when the last has left.

    FSDP2's hooks gather its weights, and free them. They also sum its gradients, from a node of autograd's graph that
    is made as the first part enters. Of the nodes that can run, autograd takes the one that was made last: this one
    comes after all others of the block.
    """

    def __init__(self, block: InterleavedBlock, is_last: bool) -> None:
        super().__init__(block, is_last)
        self._has_entered, self._left = False, dict[int, Tensor]()

    def enter(self, x_BTh: Tensor) -> Tensor:
        if self._has_entered:
            return x_BTh
        self._has_entered = True
        args: tuple[Any, ...] = (x_BTh,)
        for key, hook in self.block._forward_pre_hooks.items():
            if key in self.block._forward_pre_hooks_with_kwargs:
                changed = hook(self.block, args, {})
                args = args if changed is None else changed[0]
            else:
                changed = hook(self.block, args)
                assert changed is None, "hooks that change the input take keyword arguments, as FSDP2's does"
        entered: Tensor = args[0]
        return entered

    def leave(self, index: int, x_BTh: Tensor) -> None:
        self._left[index] = x_BTh
        if len(self._left) < self.block.parts.number:
            return
        outputs = [self._left.pop(i) for i in range(self.block.parts.number)]
        for key, hook in self.block._forward_hooks.items():
            more: list[Any] = [{}] if key in self.block._forward_hooks_with_kwargs else []
            changed = hook(self.block, (), *more, outputs)
            assert changed is None or all(a is b for a, b in zip(changed, outputs, strict=True)), "outputs have gone on"
