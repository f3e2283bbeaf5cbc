"""Test the parts of context parallelism: the layout of tokens, the pairs that each ring step covers, and attention
compared with dense attention."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.models.causal_attention import causal_within
from fourfold.parallel.attention import block_attention
from fourfold.parallel.attention.block_attention import AttentionScores, attend_block, attend_block_backward
from fourfold.parallel.attention.context import chunks_of, in_order, take_chunks
from fourfold.parallel.attention.ring import block_of_step, merge


@dataclass(frozen=True)
class Place:
    """A stand-in for an axis. It has the attributes that the layout needs, but no process group."""

    size: int
    rank: int


def documents_of(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    starts = torch.rand(batch, length, generator=generator) < 4 / length
    return starts.cumsum(1)


SCORES = AttentionScores(0.25)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: AttentionScores = SCORES) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sum-exps in plain operations. A query that sees nothing gets 0 and −∞."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    products = scores.scale * (q @ k.mT)
    if scores.softcap:
        products = scores.softcap * (products / scores.softcap).tanh()
    products = products.masked_fill(~mask, -torch.inf)
    lse = products.logsumexp(-1)
    weights = (products - lse.masked_fill(lse.isinf(), 0)[..., None]).exp()
    return weights @ v, lse


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_chunks_are_a_partition(ranks: int) -> None:
    assert sorted(chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks)) == list(range(2 * ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_taking_chunks_and_putting_them_in_order_are_inverse(ranks: int) -> None:
    whole = torch.arange(2 * 24 * 3).view(2, 24, 3)
    parts = torch.stack([take_chunks(whole, rank, ranks) for rank in range(ranks)])
    if ranks == 1:
        assert torch.equal(parts[0], whole)
        return
    assert torch.equal(in_order(parts, ranks), whole)
    again = torch.stack([take_chunks(in_order(parts, ranks), rank, ranks) for rank in range(ranks)])
    assert torch.equal(again, parts)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("masks_documents", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 4, 5, 6, 13, 99])
def test_the_steps_of_all_ranks_cover_the_mask_exactly(ranks: int, masks_documents: bool, window: int) -> None:
    """The rank that has a query computes every visible pair with this query exactly once, and no other pair."""
    length = 8 * ranks
    documents = documents_of(3, length) if masks_documents else torch.zeros(3, length, dtype=torch.int64)
    met = torch.zeros(3, length, length, dtype=torch.int64)
    position = torch.arange(length)[None]
    for rank in range(ranks):
        cp = Place(ranks, rank)
        for source in range(ranks):
            given = documents if masks_documents else None
            block = block_of_step(source, length // ranks, given, cp, window, position.device)
            if block is None:
                continue
            queries = take_chunks(position, rank, ranks)[0, block.queries]
            keys = take_chunks(position, source, ranks)[0, block.keys]
            seen = torch.ones(3, len(queries), len(keys), dtype=torch.bool)
            if block.causal:
                seen = seen.tril()
            if block.mask_B1QK is not None:
                seen &= block.mask_B1QK[:, 0]
            met[:, queries[:, None], keys[None]] += seen
    assert torch.equal(met, causal_within(documents, window)[:, 0].long())


def test_ranks_that_no_window_reaches_are_skipped() -> None:
    """Four ranks hold 8 chunks of 4 tokens. A window of 4 tokens reaches only the previous chunk, which is on the rank
    before or after."""
    blocks = {source: block_of_step(source, 8, None, Place(4, 1), 4, torch.device("cpu")) for source in range(4)}
    assert blocks[3] is None
    assert blocks[0] is not None and (blocks[0].queries, blocks[0].keys) == (slice(0, 4), slice(0, 4))
    assert blocks[2] is not None and (blocks[2].queries, blocks[2].keys) == (slice(4, 8), slice(4, 8))


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_the_same_work(ranks: int) -> None:
    """Count the pairs of queries and keys that each rank computes. In causal blocks, half of the pairs count. The
    layout gives each rank an early and a late chunk, so that these counts are equal."""
    tokens, work = 8, set()
    for rank in range(ranks):
        pairs = 0.0
        for source in range(ranks):
            block = block_of_step(source, tokens, None, Place(ranks, rank), 0, torch.device("cpu"))
            assert block is not None
            size = len(range(tokens)[block.queries]) * len(range(tokens)[block.keys])
            pairs += size / 2 if block.causal else size
        work.add(pairs)
    assert len(work) == 1


MASKS = ["none", "causal", "documents", "rows that see nothing"]


def case_of(mask: str, kv_heads: int) -> tuple[list[Tensor], bool, Tensor | None, Tensor]:
    """Return q, k, v, the output's gradient, whether attention is causal, the mask argument, and the visible pairs."""
    generator = torch.Generator().manual_seed(3)
    queries, keys = 12, 12 if mask in ("causal", "documents") else 20
    shapes = [(2, 4, queries, 16), (2, kv_heads, keys, 16), (2, kv_heads, keys, 16), (2, 4, queries, 16)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    seen = torch.ones(2, 1, queries, keys, dtype=torch.bool)
    given = None
    if mask == "causal":
        seen = seen.tril()
    elif mask == "documents":
        seen = given = causal_within(documents_of(2, queries))
    elif mask == "rows that see nothing":
        given = torch.rand(2, 1, queries, keys, generator=generator) < 0.4
        given[0, :, 3:6] = False
        seen = given
    return tensors, mask == "causal", given, seen


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_a_block_of_attention_is_dense_attention(mask: str, kv_heads: int) -> None:
    (q, k, v, grad), causal, given, seen = case_of(mask, kv_heads)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    expected, expected_lse = dense(q, k, v, seen)
    expected.backward(grad)
    with torch.no_grad():
        out, lse = attend_block(q, k, v, causal, given, SCORES)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=1e-5, atol=1e-6)
    # Rows without keys have no gradient to compare. The next tests check gradients with more keys.
    if mask == "rows that see nothing":
        assert (out[0, :, 3:6] == 0).all()
        assert (lse[0, :, 3:6] == -torch.inf).all()
        return
    with torch.no_grad():
        gradients = attend_block_backward(grad, q, out, lse, k, v, causal, given, SCORES)
    for got, tensor in zip(gradients, (q, k, v), strict=True):
        torch.testing.assert_close(got, tensor.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [5, 12], ids=["in parts", "at once"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_block_of_capped_attention_is_dense_attention(mask: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "CAPPED_ROWS", rows)
    (q, k, v, grad), causal, given, seen = case_of(mask, kv_heads=2)
    capped = AttentionScores(0.25, 0.7)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    scores = 0.7 * (0.25 * (q @ k.repeat_interleave(2, 1).mT) / 0.7).tanh()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = weights.masked_fill(~seen.any(-1, keepdim=True), 0) @ v.repeat_interleave(2, 1)
    with torch.no_grad():
        out, lse = attend_block(q, k, v, causal, given, capped)
        gradients = attend_block_backward(grad, q, out, lse, k, v, causal, given, capped)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-6)
    # Without any key, softmax has no gradient.
    if mask == "rows that see nothing":
        return
    expected.backward(grad)
    for got, tensor in zip(gradients, (q, k, v), strict=True):
        torch.testing.assert_close(got, tensor.grad, rtol=1e-5, atol=1e-5)


def test_capped_scores_are_never_all_in_memory() -> None:
    sizes = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor))
            return out

    with torch.device("meta"), Watching():
        q, k, v = torch.empty(3, 1, 1, 4096, 16)
        grad, lse = torch.empty(1, 1, 4096, 16), torch.empty(1, 1, 4096)
        attend_block(q, k, v, True, None, AttentionScores(0.25, 0.7))
        attend_block_backward(grad, q, q, lse, k, v, True, None, AttentionScores(0.25, 0.7))
    assert max(sizes) == block_attention.CAPPED_ROWS * 4096


@pytest.mark.parametrize("mask", ["none", "rows that see nothing"])
def test_parts_merge_to_the_whole(mask: str) -> None:
    """Attend to two blocks of keys. ``merge`` joins outputs and log-sum-exps, and each block's gradients follow from
    the merged results."""
    (q, k, v, grad), _, given, seen = case_of(mask, kv_heads=2)
    if given is not None:
        # In the ring's first block, every query sees a key.
        seen[..., 0] = True
    for tensor in (q, k, v):
        tensor.requires_grad_()
    expected, expected_lse = dense(q, k, v, seen)
    expected.backward(grad)
    blocks = [slice(0, 7), slice(7, 20)]
    with torch.no_grad():
        out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
        for keys in blocks:
            part_mask = None if given is None else seen[..., keys]
            merge(out, lse, *attend_block(q, k[:, :, keys], v[:, :, keys], False, part_mask, SCORES))
        torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, expected_lse.detach(), rtol=1e-5, atol=1e-6)
        dq = torch.zeros_like(q)
        for keys in blocks:
            part_mask = None if given is None else seen[..., keys]
            part = (k[:, :, keys], v[:, :, keys], False, part_mask, SCORES)
            dq_part, dk, dv = attend_block_backward(grad, q, out, lse, *part)
            dq += dq_part
            torch.testing.assert_close(dk, k.grad[:, :, keys], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(dv, v.grad[:, :, keys], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dq, q.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("multiple", "padded"), [(32, 32), (1, 20)], ids=["CUDA", "AMD"])
def test_log_sum_exps_have_the_length_that_a_gpus_kernel_wants(
    monkeypatch: pytest.MonkeyPatch, multiple: int, padded: int
) -> None:
    """If there is a mask, CUDA's kernel expects padded log-sum-exps, and AMD's kernel refuses them. The tensors here
    have no values."""
    lengths = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._overloadpacket.__name__ == "_scaled_dot_product_efficient_attention_backward":
                lengths.append(args[6].shape[-1])
                assert args[6].is_contiguous()
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(block_attention, "LSE_MULTIPLE", multiple)
    with torch.device("meta"), Watching():
        q, grad, out = torch.empty(3, 1, 4, 20, 16)
        k, v = torch.empty(2, 1, 2, 24, 16)
        mask, lse = torch.ones(1, 1, 20, 24, dtype=torch.bool), torch.empty(1, 4, 20)
        attend_block_backward(grad, q, out, lse, k, v, False, mask, SCORES)
    assert lengths == [padded]
