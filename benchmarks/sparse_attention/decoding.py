"""Decode token by token with any sparse-attention method. All methods share one dense pass over the prompt.

Shape letters: B sequences, N query heads, K KV heads, G = N / K, Q rows, S keys, D head_dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from benchmarks.sparse_attention.rivals.interface import Prompt, Rival, Step
from fourfold.inference.loki.architecture import attentions_of
from fourfold.inference.loki.cache import GrowingLayer

NAME = "sparse_attention_benchmark"
"""The name under which this attention function and its mask are registered in transformers."""

LAST_QUERIES = 32
CHUNK_SCORES = 1 << 22
"""Largest number of attention scores in memory at a time, when ``summed_attention`` adds up the attention to each
key."""


@dataclass
class LayerRecord:
    """The last queries of a layer's prompt, and the attention that each key of the prompt got. Some methods use the
    queries and this attention to choose keys."""

    query_BNWD: Tensor
    mass_BKS: Tensor


class Decoder:
    """A model with a key-value cache. After each method has decoded, the cache is cut back to the end of the prompt, so
    that the next method starts from the same state.

    Args:
        model: A transformers model.
        capacity: Number of tokens to allocate memory for.
    """

    def __init__(self, model: Any, capacity: int) -> None:
        self.model, self.capacity = model, capacity
        self.attentions = attentions_of(model)
        is_new = "cache" in inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if is_new else "past_key_values"  # transformers 5.24 renamed this argument.
        self.rival: Rival | None = None
        self.cache: Any = None
        self.records: list[LayerRecord | None] = []
        AttentionInterface.register(NAME, self._attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)

    @torch.no_grad()
    def prefill(self, tokens_BS: Tensor) -> Tensor:
        """Process a prompt with dense attention, and return the logits of its last token, [B, V]."""
        self.cache = DynamicCache()
        self.cache.layers = [GrowingLayer(self.capacity) for _ in self.attentions]
        self.records = [None] * len(self.attentions)
        return self._forward(tokens_BS)

    @contextmanager
    def returning(self) -> Iterator[None]:
        """When the context ends, remove from the cache all tokens that were added inside it."""
        records, length = list(self.records), self.cache.get_seq_length()
        try:
            yield
        finally:
            self.records = records
            if added := self.cache.get_seq_length() - length:
                for layer in self.cache.layers:
                    layer.crop(-added)

    @torch.no_grad()
    def extend(self, tokens_BS: Tensor) -> None:
        """Append tokens to the prompt, with dense attention. The list of tokens may be empty."""
        if tokens_BS.shape[1]:
            self._forward(tokens_BS)

    @torch.no_grad()
    def decode(self, rival: Rival, tokens_BS: Tensor) -> Tensor:
        """Process tokens one by one with a method, and return the logits, [B, S, V]. Then remove these tokens from the
        cache."""
        rival.start([self._prompt(number) for number in range(len(self.attentions))])
        with self.returning():
            self.rival = rival
            try:
                return torch.stack([self._forward(token_B1) for token_B1 in tokens_BS.split(1, dim=1)], 1)
            finally:
                self.rival = None

    def _forward(self, tokens_BS: Tensor) -> Tensor:
        out = self.model(input_ids=tokens_BS, use_cache=True, logits_to_keep=1, **{self.cache_argument: self.cache})
        logits_BV: Tensor = out.logits[:, -1]
        return logits_BV

    def _prompt(self, number: int) -> Prompt:
        record, keys = self.records[number], self.cache.layers[number].keys
        assert record is not None
        heads = keys.shape[1]
        query_BKGWD = record.query_BNWD.unflatten(1, (heads, -1))
        return Prompt(keys, query_BKGWD, record.mass_BKS, self.attentions[number].head_dim ** -0.5)

    def _attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float = 1.0,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        number, heads = module.layer_idx, key.shape[1]
        if self.rival is not None:
            step = Step(number, query[:, :, 0].unflatten(1, (heads, -1)), key, value, scaling)
            return self.rival.decode(step).flatten(1, 2)[:, None], None
        before = self.records[number]
        mass_BKS = summed_attention(query, key, scaling)
        last_BNWD = query
        if before is not None:
            mass_BKS[..., : before.mass_BKS.shape[-1]] += before.mass_BKS
            last_BNWD = torch.cat([before.query_BNWD, query], 2)
        self.records[number] = LayerRecord(last_BNWD[:, :, -LAST_QUERIES:].clone(), mass_BKS)
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **keywords)


def summed_attention(query_BNQD: Tensor, key_BKSD: Tensor, scaling: float) -> Tensor:
    """Return the attention that each key gets, summed over the queries and over the query heads that share a KV head,
    [B, K, S]. The queries must belong to the last tokens of the sequence."""
    query_BKGQD = query_BNQD.unflatten(1, (key_BKSD.shape[1], -1))
    rows, length = query_BNQD.shape[2], key_BKSD.shape[2]
    mass_BKS = torch.zeros(key_BKSD.shape[:3])
    chunk = max(1, CHUNK_SCORES // (query_BNQD.shape[0] * query_BNQD.shape[1] * length))
    for first in range(0, rows, chunk):
        query_BKGqD = query_BKGQD[:, :, :, first : first + chunk]
        seen = length - rows + first + query_BKGqD.shape[3]
        scores_BKGqs = torch.matmul(query_BKGqD * scaling, key_BKSD[:, :, None, :seen].transpose(-1, -2))
        hidden_qs = torch.ones(scores_BKGqs.shape[-2:], dtype=torch.bool).triu(seen - query_BKGqD.shape[3] + 1)
        mass_BKS[..., :seen] += torch.softmax(scores_BKGqs.masked_fill_(hidden_qs, float("-inf")), -1).sum((2, 3))
    return mass_BKS


def inverse_frequencies(model: Any) -> Tensor:
    """Return the angle per position of each pair of channels in a Llama's rotary embedding, [D / 2]."""
    angles: Tensor = model.model.rotary_emb.inv_freq
    return angles


def stacked(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return several lists of tokens, all of the same length, as one tensor [B, S]."""
    return torch.tensor([list(row) for row in rows], dtype=torch.long)
