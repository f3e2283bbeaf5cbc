"""A step reads no more of its cache than it needs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tiny_loki import encoder_of

from benchmarks.cache_traffic import CacheTraffic, dense_bytes, floor_bytes
from fourfold.inference.loki import LokiConfig
from fourfold.inference.loki.attend import decode
from fourfold.inference.loki.cache import LokiLayer


@pytest.mark.parametrize(("length", "k", "batch"), [(2000, 500, 1), (2000, 500, 2), (20_000, 1000, 1)])
def test_bytes_read(length: int, k: int, batch: int) -> None:
    """Rank by 16 of 64 components, with four query heads on each of two KV heads, in short and long contexts."""
    heads, head_dim, d = 2, 64, 16
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(heads, head_dim, head_dim, generator=generator)).Q[..., :d].contiguous()
    encoder = encoder_of(basis)
    layer = LokiLayer(encoder, capacity=length + 10)
    tokens = torch.randn(batch, heads, length, head_dim, generator=generator)
    layer.update(tokens, tokens)
    query = torch.randn(batch, 8, head_dim, generator=generator)
    layer.value_sum.of(layer.values, None)
    with CacheTraffic([layer.keys, layer.values, layer.code_BKSC]) as traffic:
        layer.update(tokens[:, :, :1], tokens[:, :, :1])
        value_sum, config = layer.value_sum.of(layer.values, None), LokiConfig(k=k, sink=1, recent=4)
        decode(query, layer.keys, layer.values, value_sum, layer.code_BKSC, encoder, k, config, 0.125)
    floor = batch * floor_bytes(length + 1, head_dim, d, k, heads, 4)
    assert 0.999 < traffic.bytes_read / floor < 1.15
    share = floor / (batch * dense_bytes(length + 1, head_dim, heads, 4))
    assert share == pytest.approx(d / 4 / (2 * head_dim * 4) + k / (length + 1))  # four components to a byte


def test_full_attention_is_counted_whole() -> None:
    keys, query = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 4, 8)
    with CacheTraffic([keys]) as traffic:
        torch.nn.functional.scaled_dot_product_attention(query, keys, keys)
        keys.transpose(1, 2)[:, 3:]
    assert traffic.bytes_read == 2 * keys.nbytes
    with CacheTraffic([keys]) as traffic:
        torch.cat([keys, query], 2)
    assert traffic.bytes_read == keys.nbytes
