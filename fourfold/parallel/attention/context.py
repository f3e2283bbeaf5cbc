"""Split sequences over the context axis cp. Each rank holds two chunks of every sequence.

A sequence is cut into 2n chunks for n ranks. Rank r has chunks r (the head chunk) and 2n − 1 − r (the tail chunk). In
this head-tail layout, all ranks have equal work under a causal mask. Only attention needs data from other cp ranks,
because all other layers process each token separately.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fourfold.data.loader import MicroBatch
from fourfold.models.causal_attention import AttentionContext, AttentionTables
from fourfold.parallel.grid.communicate import exchange
from fourfold.parallel.grid.grid import Axis

C = TypeVar("C", bound=AttentionContext)


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the indices of the two chunks that a rank holds, out of a sequence's 2·ranks chunks."""
    return rank, 2 * ranks - 1 - rank


def take_chunks(t_BS: Tensor, rank: int, ranks: int) -> Tensor:
    """Select a rank's tokens from whole sequences, [B, S] → [B, S/ranks]."""
    if ranks == 1:
        return t_BS
    chunks = t_BS.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[i] for i in chunks_of(rank, ranks)], dim=1)


def share_of_sequences(micro_batch: MicroBatch[Tensor], cp: Axis) -> MicroBatch[Tensor]:
    """Select this rank's tokens from a micro-batch.

    ``document_ends`` is not split, because attention needs to know the documents of all tokens.
    """
    if cp.size == 1:
        return micro_batch
    positions = micro_batch.positions
    if positions is None:
        positions = torch.arange(micro_batch.tokens.shape[1], device=micro_batch.tokens.device)[None]
    by_token = replace(micro_batch, positions=positions, document_ends=None, reference=None)
    mine = by_token.map(lambda t: take_chunks(t, cp.rank, cp.size))
    return replace(mine, document_ends=micro_batch.document_ends, reference=micro_batch.reference)


@dataclass(frozen=True)
class DocumentContext(AttentionContext):
    """The tables that attention reads for this rank's tokens, such as rotary angles. Instead of a mask, they contain
    the document ends of the full sequence."""


def context_of_sequences(context: C, sequences: slice) -> C:
    """Select the rows of some sequences from the attention tables of a batch. A table with only one row applies to all
    sequences and stays unchanged."""

    def rows(table: Tensor | None) -> Tensor | None:
        return table if table is None or len(table) == 1 else table[sequences]

    tables: dict[str, Any] = {
        field.name: rows(getattr(context, field.name)) for field in fields(context) if field.type != "int"
    }
    return replace(context, **tables)


class DocumentTables(AttentionTables):
    """Computes the ``DocumentContext`` of this rank's tokens."""

    def with_documents(
        self, tables: AttentionContext, document_ends_BE: Tensor | None, positions_BS: Tensor
    ) -> DocumentContext:
        return DocumentContext(**{**vars(tables), "document_ends_BE": document_ends_BE})


def gather_sequence(cp: Axis, *of_tokens: Tensor) -> tuple[Tensor, ...]:
    """Exchange some tokens of all heads for all tokens of some heads (Ulysses, arXiv 2309.14509).

    Args:
        cp: The context axis.
        of_tokens: Tensors of this rank's tokens, such as queries, keys, and values. Each is [B, T, heads, D], or
            [B, T, f] if the channels of all heads are joined.

    Returns:
        The same tensors with all tokens, in sequence order, but only with this rank's share of the heads: [B, S,
        heads/cp, D] or [B, S, f/cp].
    """
    if cp.size == 1:
        return of_tokens
    heads = [t.unflatten(2, (cp.size, -1)) for t in of_tokens]
    parts_nBTh = torch.cat(heads, dim=3).movedim(2, 0)
    received_nBTh = exchange(parts_nBTh, cp, "attention: inputs")
    whole: tuple[Tensor, ...] = in_order(received_nBTh, cp.size).split([t.shape[3] for t in heads], dim=2)
    return whole


def scatter_sequence(out_BShD: Tensor, cp: Axis) -> Tensor:
    """Reverse ``gather_sequence``: return this rank's tokens of all heads, [B, T, N, D]."""
    if cp.size == 1:
        return out_BShD
    parts_nBThD = torch.stack([take_chunks(out_BShD, rank, cp.size) for rank in range(cp.size)])
    received_nBThD = exchange(parts_nBThD, cp, "attention: outputs")
    return received_nBThD.movedim(0, 2).flatten(2, 3)


def in_order(parts_nBT: Tensor, ranks: int) -> Tensor:
    """Put the tokens of n ranks into sequence order, [n, B, T, …] → [B, S, …]."""
    heads, tails = parts_nBT.chunk(2, dim=2)
    return torch.cat([*heads, *tails.flip(0)], dim=1)
