"""List faults in attention over documents, and over sequences that cp or y split."""

from __future__ import annotations

from mutants import CP2, ONE_SEQUENCE, PACKED, SIX_HEADS, ULYSSES, X2Y2, Mutant

CONTEXT = [
    Mutant(
        "a cp rank gets the wrong chunks of the sequence",
        "parallel.attention.context:chunks_of",
        "return rank, 2 * ranks - 1 - rank",
        "return rank, ranks + rank",
        grid=CP2,
    ),
    Mutant(
        "Ulysses joins the late chunks of a sequence in the wrong order",
        "parallel.attention.context:in_order",
        "return torch.cat([*heads, *tails.flip(0)], dim=1)",
        "return torch.cat([*heads, *tails], dim=1)",
        grid=ULYSSES,
    ),
    Mutant(
        "every cp rank uses the positions of the first cp rank",
        "parallel.attention.context:share_of_sequences",
        "take_chunks(t, cp.rank, cp.size)",
        "take_chunks(t, 0 if t is positions else cp.rank, cp.size)",
        grid=CP2,
    ),
    Mutant(
        "in ring attention, queries attend to later keys",
        "parallel.attention.ring:block_of_step",
        "queries, keys = everything, slice(0, half)",
        "queries, keys = everything, everything",
        grid=CP2,
    ),
    Mutant(
        "ring attention merges partial results without rescaling them",
        "parallel.attention.ring:merge",
        "out.mul_((lse - both).exp_()[..., None])",
        "out.mul_(1.0)",
        grid=CP2,
    ),
    Mutant(
        "in ring attention, queries attend to earlier documents",
        "parallel.attention.ring:block_of_step",
        "mask_BQK = ours_BQ[:, :, None] == theirs_BK[:, None, :]",
        "mask_BQK = ours_BQ[:, :, None] >= theirs_BK[:, None, :]",
        grid=CP2,
        sections=PACKED,
    ),
    Mutant(
        "in ring attention, a document that starts in the middle of the sequence loses its first token",
        "parallel.attention.ring:block_of_step",
        "ours_BQ, theirs_BK = _of_both(documents_BS, source, queries, keys, cp)",
        "documents_BS = documents_BS.clone()\ndocuments_BS[:, length // 2] = documents_BS[:, length // 2 - 1]\n"
        "ours_BQ, theirs_BK = _of_both(documents_BS, source, queries, keys, cp)",
        grid=CP2,
        sections=PACKED | {"training": {"seq_length": 256}},
    ),
    Mutant(
        "ring attention overwrites the gradients of queries instead of adding to them",
        "parallel.attention.ring:_Ring.backward",
        "dq[:, :, rows] += dq_part",
        "dq[:, :, rows] = dq_part",
        grid=CP2,
    ),
    Mutant(
        "ring attention loses the gradients of keys from other ranks",
        "parallel.attention.ring:_Ring.backward",
        "torch.zeros_like(kv, dtype=torch.float32) if dkv_coming is None else dkv_coming.wait()",
        "torch.zeros_like(kv, dtype=torch.float32) if dkv_coming is None else dkv_coming.wait() * 0",
        grid=CP2,
    ),
    Mutant(
        "attention ignores document boundaries",
        "parallel.attention.attention:SharedAttentionCore.attend",
        "document_ends_BE is None and not 0 < window < q_BSnD.shape[1] and not self.softcap",
        "True",
        sections=PACKED,
    ),
    Mutant(
        "every document includes all earlier documents of its sequence",
        "parallel.attention.document_attention:_documents",
        "            begin = end",
        "            begin = 0",
        sections=PACKED,
    ),
    Mutant(
        "in packed documents, queries attend to later keys",
        "parallel.attention.document_attention:attend_in_turn",
        "attend_block(q, k, v, mask is None, mask, scores)",
        "attend_block(q, k, v, False, mask, scores)",
        grid=ULYSSES,
        sections=PACKED,
    ),
    Mutant(
        "in packed documents, attention's backward pass includes later keys",
        "parallel.attention.document_attention:differentiate_in_turn",
        "attend_block_backward(grad, q, out, lse, k, v, mask is None, mask, scores)",
        "attend_block_backward(grad, q, out, lse, k, v, False, mask, scores)",
        sections=PACKED,
    ),
    Mutant(
        "if y splits the queries, every rank masks its queries like the first queries of the sequence",
        "parallel.attention.attention:SharedAttentionCore.attend_share",
        "self.y.rank * q.shape[1]",
        "0",
        SIX_HEADS,
        X2Y2,
        ONE_SEQUENCE,
    ),
    Mutant(
        "if y splits the sequences, every rank uses the document boundaries of the first sequences",
        "parallel.attention.attention:SharedAttentionCore.attend_share",
        "mine = slice(self.y.rank * len(q), (self.y.rank + 1) * len(q))",
        "mine = slice(0, len(q))",
        SIX_HEADS,
        X2Y2,
        PACKED,
    ),
]
