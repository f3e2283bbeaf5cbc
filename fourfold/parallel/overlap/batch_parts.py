"""Run batch parts: while one part of a micro-batch computes, the collectives of the other parts run.

Sequences do not depend on each other. So a block can process a micro-batch in parts of a few sequences each (Domino,
Wang et al. 2024, arXiv 2409.15241). If there are too few sequences, each part has some tokens of every sequence. Such
parts depend on each other only in attention. Parts also alternate in the backward pass and in the recomputation of a
block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fourfold.config.layout import AttentionSplit
from fourfold.config.model_keys import LayerType
from fourfold.models.causal_attention import AttentionContext
from fourfold.models.mlp import MLP
from fourfold.models.recomputation import RECOMPUTES, is_recomputed, recomputable
from fourfold.models.transformer import Block, BlockStack, Transformer, normed
from fourfold.overlap_order import Steps, Until, run_batch_parts
from fourfold.parallel.attention.context import context_of_sequences
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.linear import Linear4D, LinearGroup
from fourfold.parallel.tensor.linear_steps import PostponedGradients, Schedule, linear_steps
from fourfold.torch_internals import run_forward_hooks, run_forward_pre_hooks


def run_in_parts(model: Transformer, number: int, split: AttentionSplit, grid: Grid, across_blocks: bool) -> None:
    """Replace a model's blocks with blocks that process a micro-batch in parts.

    The blocks must already consist of parallel layers. A micro-batch that cannot be divided runs as one part.

    Args:
        number: number of parts per micro-batch.
        split: how the ranks of the tensor axis y share attention.
        across_blocks: whether a part may enter the next block without waiting for the other parts.
    """
    multiple, ranks = (grid.y.size, grid.x.size) if split == "batch" else (1, 1)
    parts = Parts(number, multiple, split != "sequence", ranks, run_ahead=grid.y.size == 1)
    blocks = {name: BlockInParts(cast("Block", block), parts) for name, block in model.layers.items()}
    model.layers = BlocksInParts(blocks, parts) if across_blocks else BlockStack(blocks)


@dataclass(frozen=True)
class Parts:
    """Settings for dividing a micro-batch into parts."""

    number: int
    """Number of parts per micro-batch."""
    multiple: int
    """The number of sequences in a part must be a multiple of this number. This number is the size of y if y splits the
    batch in attention, and otherwise 1."""
    by_tokens: bool
    """Whether parts may divide the tokens of each sequence if there are too few sequences. False if y splits the
    queries in attention."""
    token_ranks: int
    """Number of ranks whose tokens are joined in the sequence dim of attention's inputs. This number is the size of x
    if y splits the batch, and otherwise 1. ``JoinedAttention`` needs this number to put the tokens in order."""
    run_ahead: bool
    """Whether a part may run several steps while another part waits. This is False with y > 1. If parts ran ahead with
    y > 1, most collectives could hide behind the matmuls of only one part."""

    def dim(self, x_BTh: Tensor) -> int | None:
        """Return which dim of a micro-batch to divide: 0 (sequences), 1 (tokens), or None if neither can be divided."""
        sequences, tokens = x_BTh.shape[:2]
        if sequences % (self.number * self.multiple) == 0:
            return 0
        return 1 if self.by_tokens and tokens % self.number == 0 else None

    def run(
        self, visits: Sequence[Visit], x_BTh: Tensor, dim: int | None, contexts: Mapping[LayerType, AttentionContext]
    ) -> Tensor:
        """Divide a micro-batch along ``dim`` into parts, and run consecutive blocks on the parts.

        If ``dim`` is None, the whole micro-batch is one part.
        """
        number, dim = (1, 0) if dim is None else (self.number, dim)
        size = x_BTh.shape[dim] // number
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

        return torch.cat(run_batch_parts(map(through, range(number), x_BTh.split(size, dim)), self.run_ahead), dim)


class BlocksInParts(BlockStack):
    """The blocks of a decoder. A batch part can enter a block while other parts are still in the previous block."""

    def __init__(self, blocks: Mapping[str, BlockInParts], parts: Parts) -> None:
        super().__init__(blocks)
        self.parts = parts

    def forward(self, x_BTh: Tensor, contexts: Mapping[LayerType, AttentionContext]) -> Tensor:
        dim = self.parts.dim(x_BTh)
        if dim is None:
            return super().forward(x_BTh, contexts)
        blocks = cast("list[BlockInParts]", list(self.values()))
        visits = [HookedVisit(block, is_last=block is blocks[-1]) for block in blocks]
        return self.parts.run(visits, x_BTh, dim, contexts)


class BlockInParts(nn.Module):
    """A block that processes a micro-batch in parts. It takes over the modules of an ordinary block."""

    def __init__(self, block: Block, parts: Parts) -> None:
        super().__init__()
        self.parts, self.layer_type, self.parallel_residual = parts, block.layer_type, block.parallel_residual
        self.residual_multiplier = block.residual_multiplier
        self.input_layernorm = block.input_layernorm
        self.self_attn = block.self_attn
        self.attention_output_layernorm = block.attention_output_layernorm
        self.post_attention_layernorm = block.post_attention_layernorm
        self.mlp = block.mlp
        self.mlp_output_layernorm = block.mlp_output_layernorm

    def forward(self, x_BTh: Tensor, context: AttentionContext) -> Tensor:
        return self.add_outputs(x_BTh, context)

    @recomputable
    def add_outputs(self, x_BTh: Tensor, context: AttentionContext) -> Tensor:
        """Do the same as ``AttentionAndMLP.add_outputs``, in parts."""
        visit = Visit(self, is_last=True)
        return self.parts.run([visit], x_BTh, self.parts.dim(x_BTh), {self.layer_type: context})

    def steps(
        self, x_BTh: Tensor, context: AttentionContext, index: int, joined: JoinedAttention | None, is_last: bool
    ) -> Steps[Tensor]:
        """Run ``add_outputs`` for one part, in steps. Between two steps, other parts can run.

        A step ends when it has started a collective, or when it must wait for the other parts.

        Args:
            index: the index of the part.
            joined: attention over all parts, if each part has only some tokens of its sequences. Otherwise None.
            is_last: False if the part enters another block right after this block. The other block starts by gathering
                this block's output.
        """
        assert isinstance(self.mlp, MLP), "parts do not take turns if there are experts"
        qkv, o_proj, up, down_proj = self.self_attn.qkv, self.self_attn.o_proj, self.mlp.up, self.mlp.down_proj
        assert isinstance(qkv, LinearGroup) and isinstance(up, LinearGroup)
        assert isinstance(o_proj, Linear4D) and isinstance(down_proj, Linear4D)
        # The backward pass of ``up`` can postpone weight gradients. The backward pass of ``o_proj`` then computes these
        # gradients while its own collective is in flight. With a parallel residual, o_proj's backward pass may run
        # first, so nothing is postponed.
        is_summed = o_proj.writes.axis.size > 1 and not self.parallel_residual
        of_up = PostponedGradients(up.layers()) if is_summed else None
        q, k, v = yield from linear_steps(normed(x_BTh, self.input_layernorm), qkv.layers(), Schedule())
        if joined is None:
            heads = self.self_attn.core(q, k, v, context)
        else:
            joined.give(index, q, k, v)
            yield Until.ALL_PARTS
            heads = joined.take(index)
        o_proj_schedule = Schedule(gather_follows=True, computes_weight_gradients_of=of_up)
        (out_BTh,) = yield from linear_steps(heads, [o_proj], o_proj_schedule)
        alpha = self.residual_multiplier
        attended_BTh = torch.add(x_BTh, normed(out_BTh, self.attention_output_layernorm), alpha=alpha)
        mlp_input_BTh = normed(x_BTh if self.parallel_residual else attended_BTh, self.post_attention_layernorm)
        up_schedule = Schedule(leaves_weight_gradients_to=of_up)
        up_BSf = yield from linear_steps(mlp_input_BTh, up.layers(), up_schedule)
        # If the backward pass recomputes ``mlp.down``, it calls the whole method. So do not split ``down`` into steps.
        if is_recomputed(self.mlp, "down"):
            return torch.add(attended_BTh, normed(self.mlp.down(*up_BSf), self.mlp_output_layernorm), alpha=alpha)
        # If no norm follows the last matmul, the backward pass does not read the matmul's output. So recomputation can
        # stop before this matmul.
        ends_early = RECOMPUTES.get() and self.mlp_output_layernorm is None
        down_schedule = Schedule(waits_before_matmul=ends_early, gather_follows=not is_last)
        (mlp_BTh,) = yield from linear_steps(self.mlp.activation(*up_BSf), [down_proj], down_schedule)
        return torch.add(attended_BTh, normed(mlp_BTh, self.mlp_output_layernorm), alpha=alpha)


class JoinedAttention:
    """Runs attention over full sequences if each batch part has only some tokens of every sequence.

    The inputs and outputs of a part are [B, ranks · t, features]: t tokens from each of several ranks, in rank order.

    Args:
        ranks: number of ranks whose tokens a part has.
    """

    def __init__(self, attend: Callable[..., Tensor], context: AttentionContext, ranks: int) -> None:
        self._attend, self._context, self._ranks = attend, context, ranks
        self._given: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._attended: dict[int, Tensor] = {}

    def give(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add the queries, keys, and values of a part."""
        self._given[index] = q, k, v

    def take(self, index: int) -> Tensor:
        """Return the attention output of a part.

        The first call computes the outputs of all parts. Before this call, call ``give`` for every part.
        """
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
    """The pass of all batch parts through one block. This class is used if the block's own forward pass runs the parts.

    Args:
        is_last: False if each part enters another block right after this block.
    """

    def __init__(self, block: BlockInParts, is_last: bool) -> None:
        self.block, self.is_last = block, is_last
        self.joined: JoinedAttention | None = None

    def enter(self, x_BTh: Tensor) -> Tensor:
        """Prepare a part to enter the block, and return the part's hidden states. The base class returns them
        unchanged."""
        return x_BTh

    def leave(self, index: int, x_BTh: Tensor) -> None:
        """Handle the block's output for a part. The base class does nothing with it."""


class HookedVisit(Visit):
    """The pass of all batch parts through one block whose own forward method is not called.

    Without a call of forward, torch does not run the block's hooks. So this class runs them: the pre-hooks when the
    first part enters, and the other hooks when the last part has left.

    The hooks belong to FSDP2. They gather the block's weights and free them. When the first part enters, they also
    create an autograd node, which sums the block's gradients in the backward pass. Autograd runs the newest ready node
    first, so this node runs after all other nodes of the block.
    """

    def __init__(self, block: BlockInParts, is_last: bool) -> None:
        super().__init__(block, is_last)
        self._has_entered, self._left = False, dict[int, Tensor]()

    def enter(self, x_BTh: Tensor) -> Tensor:
        if self._has_entered:
            return x_BTh
        self._has_entered = True
        return run_forward_pre_hooks(self.block, x_BTh)

    def leave(self, index: int, x_BTh: Tensor) -> None:
        self._left[index] = x_BTh
        if len(self._left) == self.block.parts.number:
            run_forward_hooks(self.block, [self._left.pop(i) for i in range(self.block.parts.number)])
