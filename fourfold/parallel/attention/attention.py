"""Attention between the tensor-parallel linear layers. Each rank computes its own heads, sequences, or queries, so no
rank repeats the work of another rank."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fourfold.config.layout import AttentionSplit, ContextMethod
from fourfold.models.causal_attention import AttentionContext, AttentionCore
from fourfold.models.norms import RMSNorm
from fourfold.models.recomputation import recomputable
from fourfold.parallel.attention.block_attention import AttentionScores, attend_masked
from fourfold.parallel.attention.context import DocumentContext, context_of_sequences, gather_sequence, scatter_sequence
from fourfold.parallel.attention.document_attention import attend_documents
from fourfold.parallel.attention.ring import ring_attention
from fourfold.parallel.grid.communicate import gather
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.linear import NORMAL_BIAS, OverY
from fourfold.parallel.tensor.norm import HeadNorm, Norm
from fourfold.parallel.tensor.sharding import Tiled

OVER_Y: dict[AttentionSplit, OverY] = {"heads": "features", "batch": "batch", "sequence": "sequence"}


class SharedAttentionCore(AttentionCore, Tiled):
    """Compute attention for this rank's share of the heads, sequences, or queries.

    ``split`` says what the ranks of the tensor axis y split: the heads ("heads"), the sequences of a batch ("batch"),
    or the queries of each sequence ("sequence"). The axis x always splits the heads. ``method`` says how the ranks of
    the context axis cp share attention: "ring" or "ulysses".

    If the key-value heads cannot be divided evenly among the ranks that split the query heads, these ranks gather the
    key-value heads in the forward pass. In the backward pass, they sum the gradients of these heads.
    """

    def __init__(
        self, core: AttentionCore, grid: Grid, split: AttentionSplit, method: ContextMethod, heads: int, kv_heads: int
    ) -> None:
        super().__init__(core.config, core.rotates)
        self.q_norm = self._norm(core.q_norm, grid, split, "q_norm")
        self.k_norm = self._norm(core.k_norm, grid, split, "k_norm")
        self.add_tile("sinks", core.sinks, NORMAL_BIAS[OVER_Y[split]], grid)
        self.split, self.x, self.y = split, grid.x, grid.y
        self.method, self.cp = method, grid.cp
        self.token_ranks = grid.x.size
        ranks, rank = grid.x.size, grid.x.rank
        if split == "heads":
            ranks, rank = ranks * grid.y.size, rank * grid.y.size + grid.y.rank
        self.kv_is_local = kv_heads % ranks == 0
        self.kv_inside_x = kv_heads % grid.x.size == 0
        heads_here, heads_per_kv = heads // ranks, heads // kv_heads
        first = rank * heads_here
        needed = [(first + head) // heads_per_kv for head in range(heads_here)]
        # torch's grouped attention requires that all key-value heads serve the same number of consecutive query heads.
        # If this is not true for this rank's heads, pass one key-value head per query head.
        distinct = sorted(set(needed))
        regular = all(needed.count(kv) == heads_here // len(distinct) for kv in distinct)
        self.kv_needed = distinct if regular else needed
        if self.kv_inside_x:
            offset = grid.x.rank * (kv_heads // grid.x.size)
            self.kv_needed = [kv - offset for kv in self.kv_needed]

    def _norm(self, norm: nn.Module | None, grid: Grid, split: AttentionSplit, name: str) -> HeadNorm | Norm | None:
        if not isinstance(norm, RMSNorm):
            return None
        if self.norms_each_head:
            return HeadNorm(norm, grid)
        axis = grid.axis("y_x") if split == "heads" else grid.x
        return Norm(norm, grid, name, axis, NORMAL_BIAS[OVER_Y[split]])

    @recomputable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        return self.attend_share(*self.norm_all_heads(q, k), v, context)

    def attend_share(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """Run attention for this rank's heads, sequences, or queries. First, gather the required keys and values from
        other ranks."""
        if self.split == "sequence":
            context = replace(context, first_query=self.y.rank * q.shape[1])
            k, v = (gather(t, self.y, 1, "attention: keys and values") for t in (k, v))
        elif self.split == "batch":
            mine = slice(self.y.rank * len(q), (self.y.rank + 1) * len(q))
            context = context_of_sequences(context, mine)
        else:
            q, k, v = (whole_sequences(t, self.token_ranks) for t in (q, k, v))
        if not self.kv_is_local:
            k, v = self._my_kv_heads(k), self._my_kv_heads(v)
        out = self.attend_heads(q, k, v, context)
        return rank_after_rank(out, self.token_ranks) if self.split == "heads" else out

    def attend(self, q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, context: AttentionContext) -> Tensor:
        if not isinstance(context, DocumentContext):
            return self._attend_some_queries(q_BSND, k_BSKD, v_BSKD, context)
        document_ends_BE, window = context.document_ends_BE, context.window
        if self.cp.size > 1 and self.method == "ring":
            scores = AttentionScores(self.scale, self.softcap)
            return ring_attention(q_BSND, k_BSKD, v_BSKD, document_ends_BE, self.cp, scores, window, self.sinks)
        q_BSnD, k_BSkD, v_BSkD = gather_sequence(self.cp, q_BSND, k_BSKD, v_BSKD)
        is_plain = document_ends_BE is None and not 0 < window < q_BSnD.shape[1] and not self.softcap
        if is_plain and self.sinks is None:
            out_BSnD = super().attend(q_BSnD, k_BSkD, v_BSkD, AttentionContext())
        else:
            options = (document_ends_BE, self.scale, window, self.softcap)
            sinks_n = None if self.sinks is None else self.sinks.chunk(self.cp.size)[self.cp.rank]
            out_BSnD, _ = attend_documents(q_BSnD, k_BSkD, v_BSkD, *options, sinks_n)
        return scatter_sequence(out_BSnD, self.cp)

    def _attend_some_queries(self, q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, context: AttentionContext) -> Tensor:
        """Run attention under a mask, for this rank's queries of each sequence.

        With soft-capping or sinks, the forward pass does not save the scores, and the backward pass computes them
        again.
        """
        if not self.softcap and self.sinks is None:
            return super().attend(q_BSND, k_BSKD, v_BSKD, context)
        q, k, v = (t.transpose(1, 2) for t in (q_BSND, k_BSKD, v_BSKD))
        mask_B1QS = self.mask_of(q_BSND, k_BSKD, context)
        assert mask_B1QS is not None, "capped scores and sinks always have a mask here"
        scores = AttentionScores(self.scale, self.softcap)
        return attend_masked(q, k, v, mask_B1QS, scores, self.sinks).transpose(1, 2)

    def _my_kv_heads(self, kv: Tensor) -> Tensor:
        """Return the key or value heads that this rank's query heads read.

        Args:
            kv: The keys, or the values, that this rank has computed. The last dim joins the channels of all heads.
        """
        if self.split == "heads":
            kv = gather(kv, self.y, 2, "attention: keys and values")
        if not self.kv_inside_x:
            kv = gather(kv, self.x, 2, "attention: keys and values")
        heads: Tensor = kv.unflatten(-1, (-1, self.head_dim))
        first, count = self.kv_needed[0], len(self.kv_needed)
        if self.kv_needed == list(range(first, first + count)):
            return heads[:, :, first : first + count].flatten(2)
        needed = torch.tensor(self.kv_needed)
        # Copy from pinned memory, because the host need not wait for such a copy.
        if kv.is_cuda:
            needed = needed.pin_memory().to(kv.device, non_blocking=True)
        return heads[:, :, needed].flatten(2)


def whole_sequences(t: Tensor, ranks: int) -> Tensor:
    """Join the tokens of n ranks into whole sequences: [n · B, T, …] → [B, n · T, …].

    The first B rows of the input are the tokens of rank 0.
    """
    by_sequence_BnTf: Tensor = t.unflatten(0, (ranks, -1)).transpose(0, 1)
    return by_sequence_BnTf.flatten(1, 2)


def rank_after_rank(t: Tensor, ranks: int) -> Tensor:
    """Reverse ``whole_sequences``: cut the sequences into the tokens of each rank, [B, n · T, …] → [n · B, T, …]."""
    by_rank_nBTf: Tensor = t.unflatten(1, (ranks, -1)).transpose(0, 1)
    return by_rank_nBTf.flatten(0, 1)
