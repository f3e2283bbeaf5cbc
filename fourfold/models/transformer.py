"""A decoder: GPT-2/3, GPT-NeoX and Llama / Mistral / Qwen / Gemma in plain, single-device PyTorch, with their MLPs
beside it.

Shapes: B sequences, S tokens, H hidden, N heads, K key-value heads, D head_dim, F inner width, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.model import IGNORE_INDEX, ModelConfig
from fourfold.models.mixture import Mixture
from fourfold.models.mlp import MLP, Linears
from fourfold.models.rope import apply_rope, rope_frequencies, rope_tables


class Transformer(nn.Module):
    """The decoder, or some of its consecutive layers: the first with the embeddings, the last with norm and head.

    Modules of a part have the names that they have in the whole. Build it under ``torch.device("meta")`` and fill it
    with ``initialize``.
    """

    def __init__(self, config: ModelConfig, layers: range | None = None) -> None:
        """layers: the numbers of the layers, by default all."""
        super().__init__()
        self.config = config
        layers = range(config.num_hidden_layers) if layers is None else layers
        has_first, has_last = layers.start == 0, layers.stop == config.num_hidden_layers
        learned = has_first and config.position_embedding == "learned"
        self.embed_tokens = nn.Embedding(config.padded_vocab_size, config.hidden_size) if has_first else None
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.attention_tables = AttentionTables(config)
        self.layers = nn.ModuleDict({str(number): Block(config, number) for number in layers})
        self.norm = norm_of(config) if has_last else None
        self.lm_head = LMHead(config) if has_last else None
        if config.tie_word_embeddings and self.lm_head is not None and self.embed_tokens is not None:
            self.lm_head.weight = self.embed_tokens.get_parameter("weight")

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        document_ends_BE: Tensor | None = None,
        loss_scale: Tensor | float = 1.0,
        x_BSH: Tensor | None = None,
        reference_B: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, vocab_size], or with labels the sum of the losses of the positions not IGNORE_INDEX; without
        the last layer its hidden states [B, S, H].

        positions_BS: each token's position (default 0, 1, 2, …); document_ends_BE: where the documents of a sequence
        end, when attention must not leave them (default: no such limit), the last at S, repeated in rows with fewer;
        loss_scale: the factor by which the caller multiplies the sum before the backward; x_BSH: the hidden states of
        the layers before, where there are any; reference_B: for a head of preference optimization.
        """
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
        if x_BSH is None:
            x_BSH = self.embed(tokens_BS, positions_BS)
        context = self.attention_tables(positions_BS, document_ends_BE)
        for block in self.blocks:
            x_BSH = block(x_BSH, context)
        if self.norm is None or self.lm_head is None:
            return x_BSH
        reference = () if reference_B is None else (reference_B,)
        out: Tensor = self.lm_head(self.norm(x_BSH), labels_BS, loss_scale, *reference)
        return out

    @property
    def blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.layers.children()))

    def embed(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """Token embeddings, and positions' where they are learned, [B, S, H]."""
        assert self.embed_tokens is not None
        x_BSH: Tensor = self.embed_tokens(tokens_BS)
        if self.config.scale_embeddings:
            x_BSH = x_BSH * x_BSH.new_full(
                (), self.config.hidden_size**0.5
            )  # rounded to the model's type, as Gemma does
        return x_BSH if self.embed_positions is None else x_BSH + self.embed_positions(positions_BS)


class Block(nn.Module):
    """One pre-norm layer; attention and MLP one after the other, or side by side (GPT-J, GPT-NeoX)."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.input_layernorm = norm_of(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = norm_of(config)
        self.mlp = Mixture(config) if config.is_sparse(number) else MLP(config)

    def forward(self, x_BSH: Tensor, context: AttentionContext) -> Tensor:
        attended_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), context)
        mlp_reads_BSH = x_BSH if self.parallel_residual else attended_BSH
        out_BSH: Tensor = attended_BSH + self.mlp(self.post_attention_layernorm(mlp_reads_BSH))
        return out_BSH


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.qkv = Linears(config.hidden_size, config.attention_bias, q_proj=queries, k_proj=keys, v_proj=keys)
        self.core = AttentionCore(config)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_output_bias)

    def forward(self, x_BSH: Tensor, context: AttentionContext) -> Tensor:
        q, k, v = self.qkv(x_BSH)
        out_BSH: Tensor = self.o_proj(self.core(q, k, v, context))
        return out_BSH


class AttentionCore(nn.Module):
    """Queries, keys and values of whole heads → the heads' outputs: norm, rotate, attend."""

    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.norms_each_head = config.qk_norm_over == "head"
        sizes = [heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)]
        if self.norms_each_head:
            sizes = [config.head_dim, config.head_dim]
        norms = [
            RMSNorm(size, config.norm_eps, config.zero_centered_norm) if config.qk_norm else None for size in sizes
        ]
        self.q_norm, self.k_norm = norms

    def forward(self, q_BSf: Tensor, k_BSf: Tensor, v_BSf: Tensor, context: AttentionContext) -> Tensor:
        return self.attend_heads(*self.norm_all_heads(q_BSf, k_BSf), v_BSf, context)

    def norm_all_heads(self, q_BSf: Tensor, k_BSf: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, normalized over all heads where the model does that."""
        if self.norms_each_head or self.q_norm is None or self.k_norm is None:
            return q_BSf, k_BSf
        return self.q_norm(q_BSf), self.k_norm(k_BSf)

    def attend_heads(self, q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, context: AttentionContext) -> Tensor:
        """Queries, keys and values, whose heads are joined in one dim → the heads' outputs, joined too."""
        q_BSND, k_BSKD, v_BSKD = (t.unflatten(-1, (-1, self.head_dim)) for t in (q_BSND, k_BSKD, v_BSKD))
        if self.norms_each_head and self.q_norm is not None and self.k_norm is not None:
            q_BSND, k_BSKD = self.q_norm(q_BSND), self.k_norm(k_BSKD)
        if context.cos_BS1d is not None and context.sin_BS1d is not None:
            queries = slice(context.first_query, context.first_query + q_BSND.shape[1])
            q_BSND = apply_rope(q_BSND, context.cos_BS1d[:, queries], context.sin_BS1d[:, queries])
            k_BSKD = apply_rope(k_BSKD, context.cos_BS1d, context.sin_BS1d)
        return self.attend(q_BSND, k_BSKD, v_BSKD, context).flatten(-2)

    def attend(self, q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, context: AttentionContext) -> Tensor:
        """Σ softmax(q·k/√D) · v over the keys that the context lets a query see, [B, S, N, D]."""
        queries = slice(context.first_query, context.first_query + q_BSND.shape[1])
        mask = context.mask_B1SS
        if mask is not None:
            mask = mask[:, :, queries]
        elif q_BSND.shape[1] != k_BSKD.shape[1]:
            mask = torch.ones(q_BSND.shape[1], k_BSKD.shape[1], dtype=torch.bool, device=q_BSND.device)
            mask = mask.tril(context.first_query)
        if mask is not None:
            # Kernels that take a mask want as many key-value heads as query heads; else torch would keep all scores.
            k_BSKD, v_BSKD = (t.repeat_interleave(q_BSND.shape[2] // t.shape[2], dim=2) for t in (k_BSKD, v_BSKD))
        out_BNSD = F.scaled_dot_product_attention(
            q_BSND.transpose(1, 2),
            k_BSKD.transpose(1, 2),
            v_BSKD.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=k_BSKD.shape[2] != q_BSND.shape[2],
        )
        return out_BNSD.transpose(1, 2)


@dataclass(frozen=True)
class AttentionContext:
    """Tables that the attention of every layer reads."""

    cos_BS1d: Tensor | None = None
    """Rotary tables; None with learned positions. B is 1 where all sequences have the same positions."""
    sin_BS1d: Tensor | None = None
    mask_B1SS: Tensor | None = None
    """True where a query may see a key; None: plain causal."""
    first_query: int = 0
    """Place of the first query in the sequence, when the queries are only a part of it."""


class AttentionTables(nn.Module):
    """Rotary tables and document mask, made once for all layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, positions_BS: Tensor, document_ends_BE: Tensor | None) -> AttentionContext:
        cos_BS1d = sin_BS1d = mask_B1SS = None
        if self.config.position_embedding == "rope":
            frequencies_d, scale = rope_frequencies(self.config, positions_BS.device)
            cos_BS1d, sin_BS1d = rope_tables(positions_BS, frequencies_d, scale)
        if document_ends_BE is not None:
            mask_B1SS = causal_within(documents_of(document_ends_BE, positions_BS.shape[1]))
        return AttentionContext(cos_BS1d, sin_BS1d, mask_B1SS)


def documents_of(document_ends_BE: Tensor, length: int) -> Tensor:
    """The document of each token, 0, 1, 2 … within its sequence, [B, S]."""
    places_BS = torch.arange(length, device=document_ends_BE.device).repeat(len(document_ends_BE), 1)
    return torch.searchsorted(document_ends_BE, places_BS, right=True)


def causal_within(documents_BS: Tensor) -> Tensor:
    """[B, 1, S, S]: true where a query may see a key, before it in its own document."""
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    return same_BSS.tril()[:, None]


class LMHead(nn.Module):
    """Hidden states → logits, or → the sum of the cross-entropies of the labeled positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.hidden_size))

    def forward(self, x_BSH: Tensor, labels_BS: Tensor | None = None, loss_scale: Tensor | float = 1.0) -> Tensor:
        """``loss_scale`` is for heads that compute gradients beside the loss; autograd needs no such hint."""
        logits_BSV = F.linear(x_BSH, self.weight)[..., : self.vocab_size]
        if labels_BS is None:
            return logits_BSV
        return F.cross_entropy(
            logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )


class RMSNorm(nn.Module):
    """x / rms(x) · weight, in float32 inside (Zhang & Sennrich 2019, arXiv 1910.07467).

    zero_centered: · (1 + weight), in float32 too (Gemma, arXiv 2403.08295).
    """

    def __init__(self, size: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.zero_centered = eps, zero_centered

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """The function of ``RMSNorm``."""
    normal = F.rms_norm(x.float(), (x.shape[-1],), eps=eps)
    if zero_centered:
        return (normal * (1 + weight.float())).to(x.dtype)
    return normal.to(x.dtype) * weight


def norm_of(config: ModelConfig) -> RMSNorm | nn.LayerNorm:
    """A norm of hidden states, of the kind that the model uses."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps, config.zero_centered_norm)


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the decoder, a tied one once."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(model).named_parameters()}
