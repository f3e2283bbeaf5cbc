"""Causal attention in plain PyTorch. Layers of the same attention type share their rotary tables and masks.

Shapes: B sequences, S tokens, N heads, K key-value heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.model import ModelConfig
from fourfold.config.model_keys import LayerType
from fourfold.models.norms import rms_norm_of
from fourfold.models.recomputation import recomputable
from fourfold.models.rope import apply_rope, rope_frequencies, rope_tables
from fourfold.models.softcap import softcapped


class AttentionCore(nn.Module):
    """The part of attention between the projections. It normalizes and rotates queries and keys, and runs attention."""

    q_norm: nn.Module | None
    k_norm: nn.Module | None
    sinks: nn.Parameter | None
    """One learned logit per query head. The softmax over the head's scores includes this logit, but the logit has no
    value vector. None if the model has no sinks."""
    is_for_gpu = False
    """If True, any device runs the operations that a GPU would run. ``fourfold trace`` sets this for GPU runs."""

    def __init__(self, config: ModelConfig, rotates: bool = True) -> None:
        super().__init__()
        self.config, self.head_dim, self.rotates = config, config.head_dim, rotates
        self.scale, self.softcap = config.attention_multiplier, config.attn_logit_softcapping
        self.norms_each_head = config.qk_norm_over == "head"
        sizes = [heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)]
        if self.norms_each_head:
            sizes = [config.head_dim, config.head_dim]
        self.q_norm, self.k_norm = [rms_norm_of(config, size) if config.qk_norm else None for size in sizes]
        sinks = nn.Parameter(torch.empty(config.num_attention_heads)) if config.attention_sinks else None
        self.register_parameter("sinks", sinks)

    @recomputable
    def forward(self, q_BSf: Tensor, k_BSf: Tensor, v_BSf: Tensor, context: AttentionContext) -> Tensor:
        return self.attend_heads(*self.norm_all_heads(q_BSf, k_BSf), v_BSf, context)

    def norm_all_heads(self, q_BSf: Tensor, k_BSf: Tensor) -> tuple[Tensor, Tensor]:
        """Apply query and key norms that cover the channels of all heads (OLMoE).

        ``attend_heads`` applies norms of single heads.
        """
        if self.norms_each_head or self.q_norm is None or self.k_norm is None:
            return q_BSf, k_BSf
        return self.q_norm(q_BSf), self.k_norm(k_BSf)

    def attend_heads(self, q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, context: AttentionContext) -> Tensor:
        """Split the channels into heads, normalize and rotate each head, and run attention.

        Inputs and output are [B, S, f], with the channels f of all heads.
        """
        q_BSND, k_BSKD, v_BSKD = (t.unflatten(-1, (-1, self.head_dim)) for t in (q_BSND, k_BSKD, v_BSKD))
        if self.norms_each_head and self.q_norm is not None and self.k_norm is not None:
            q_BSND, k_BSKD = self.q_norm(q_BSND), self.k_norm(k_BSKD)
        if self.rotates and context.cos_BS1d is not None and context.sin_BS1d is not None:
            queries = slice(context.first_query, context.first_query + q_BSND.shape[1])
            q_BSND = apply_rope(q_BSND, context.cos_BS1d[:, queries], context.sin_BS1d[:, queries])
            k_BSKD = apply_rope(k_BSKD, context.cos_BS1d, context.sin_BS1d)
        return self.attend(q_BSND, k_BSKD, v_BSKD, context).flatten(-2)

    def attend(self, q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, context: AttentionContext) -> Tensor:
        """Return Σ softmax(scale · q·k) · v over the keys that a query may see, [B, S, N, D].

        The scores scale · q·k are soft-capped if the model has a soft-cap. If a head has a sink, its softmax includes
        the sink as one more score.
        """
        mask = self.mask_of(q_BSND, k_BSKD, context)
        is_float32_on_gpu = q_BSND.dtype == torch.float32 and (q_BSND.is_cuda or self.is_for_gpu)
        if mask is not None or (is_float32_on_gpu and k_BSKD.shape[2] != q_BSND.shape[2]):
            # Kernels with a mask, and the float32 kernel on a GPU, need as many key-value heads as query heads. So
            # repeat the key-value heads. Otherwise torch would use no fused kernel, and would keep all scores in
            # memory.
            k_BSKD, v_BSKD = (t.repeat_interleave(q_BSND.shape[2] // t.shape[2], dim=2) for t in (k_BSKD, v_BSKD))
        q, k, v = (t.transpose(1, 2) for t in (q_BSND, k_BSKD, v_BSKD))
        if (self.softcap or self.sinks is not None) and mask is not None:
            scores_BNSS = softcapped(self.scale * (q @ k.mT), self.softcap).masked_fill(~mask, -torch.inf)
            if self.sinks is not None:
                sinks_BNS1 = self.sinks.to(scores_BNSS.dtype)[:, None, None].expand(*scores_BNSS.shape[:3], 1)
                weights_BNSS = torch.cat([scores_BNSS, sinks_BNS1], -1).softmax(-1, dtype=torch.float32)[..., :-1]
            else:
                weights_BNSS = scores_BNSS.softmax(-1, dtype=torch.float32)
            return (weights_BNSS.to(v.dtype) @ v).transpose(1, 2)
        out_BNSD = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=k.shape[1] != q.shape[1]
        )
        return out_BNSD.transpose(1, 2)

    def mask_of(self, q_BSND: Tensor, k_BSKD: Tensor, context: AttentionContext) -> Tensor | None:
        """Return a mask [B or 1, 1, Q, S] for Q queries and S keys. It is true if a query may see a key.

        Return None if the causal mask that attention kernels apply themselves is enough.
        """
        first, count = context.first_query, q_BSND.shape[1]
        if context.mask_B1SS is not None:
            return context.mask_B1SS[:, :, first : first + count]
        if count == k_BSKD.shape[1] and not self.softcap and self.sinks is None:
            return None
        return torch.ones(1, 1, count, k_BSKD.shape[1], dtype=torch.bool, device=q_BSND.device).tril(first)


@dataclass(frozen=True)
class AttentionContext:
    """Inputs that all layers of one attention type read in addition to hidden states."""

    cos_BS1d: Tensor | None = None
    """cos of the rotary angles (``rope_tables``). None if the model has no rotary embeddings. B is 1 if all sequences
    have the same positions."""
    sin_BS1d: Tensor | None = None
    """sin of the same angles."""
    mask_B1SS: Tensor | None = None
    """True if a query may see a key. None means plain causal attention."""
    first_query: int = 0
    """The index of the first query's token in the sequence. It is above 0 if other ranks have earlier queries."""
    window: int = 0
    """The number of tokens that a query sees, including itself. 0 means no window."""
    is_data_BS: Tensor | None = None
    """False for padding, which experts do not process. None means that there is no padding."""
    document_ends_BE: Tensor | None = None
    """The position after the last token of each document. None if ``mask_B1SS`` separates the documents, or if
    attention may cross document boundaries."""


class AttentionTables(nn.Module):
    """Computes the rotary tables and masks of each attention type once per forward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self, positions_BS: Tensor, document_ends_BE: Tensor | None, is_data_BS: Tensor | None = None
    ) -> dict[LayerType, AttentionContext]:
        config = self.config
        shared, contexts = self._rotary(positions_BS, local=False), dict[LayerType, AttentionContext]()
        for kind in config.kinds_of_layers:
            if kind == "linear_attention":
                contexts[kind] = AttentionContext(is_data_BS=is_data_BS, document_ends_BE=document_ends_BE)
                continue
            slides = kind == "sliding_attention"
            has_own = slides and config.rope_local_base_freq > 0
            cos_BS1d, sin_BS1d = self._rotary(positions_BS, local=True) if has_own else shared
            window = config.sliding_window if slides else 0
            tables = AttentionContext(cos_BS1d, sin_BS1d, window=window, is_data_BS=is_data_BS)
            contexts[kind] = self.with_documents(tables, document_ends_BE, positions_BS)
        return contexts

    def with_documents(
        self, tables: AttentionContext, document_ends_BE: Tensor | None, positions_BS: Tensor
    ) -> AttentionContext:
        """Add a mask for documents and for the window. Return the tables unchanged if there are neither documents nor a
        window, because plain causal attention needs no mask."""
        length = positions_BS.shape[1]
        if document_ends_BE is None and not 0 < tables.window < length:
            return tables
        documents_BS = positions_BS.new_zeros(1, length)
        if document_ends_BE is not None:
            documents_BS = documents_of(document_ends_BE, length)
        return replace(tables, mask_B1SS=causal_within(documents_BS, tables.window))

    def _rotary(self, positions_BS: Tensor, local: bool) -> tuple[Tensor | None, Tensor | None]:
        if self.config.position_embedding != "rope":
            return None, None
        frequencies_d, scale = rope_frequencies(self.config, positions_BS.device, local)
        return rope_tables(positions_BS, frequencies_d, scale)


def documents_of(document_ends_BE: Tensor, length: int) -> Tensor:
    """Return the index of each token's document within its sequence, [B, S]."""
    places_BS = torch.arange(length, device=document_ends_BE.device).repeat(len(document_ends_BE), 1)
    return torch.searchsorted(document_ends_BE, places_BS, right=True)


def causal_within(documents_BS: Tensor, window: int = 0) -> Tensor:
    """Return a mask [B, 1, S, S] that is true if a query may see a key.

    A query sees keys up to its own position, in its own document, and within the window. A ``window`` of 0 means no
    window.
    """
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    seen_BSS = same_BSS.tril().triu(1 - window) if window else same_BSS.tril()
    return seen_BSS[:, None]
