"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are computed from short latents.

Shapes: B sequences, S tokens, H hidden size, N heads, c latent width, v width of a value head. A query or key head has
n channels without rotary embeddings and r channels with rotary embeddings.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.model import ModelConfig
from fourfold.models.causal_attention import AttentionContext, AttentionCore
from fourfold.models.mlp import Linears
from fourfold.models.norms import RMSNorm
from fourfold.models.recomputation import recomputable

LATENT_EPS = 1e-6
"""``eps`` of the norms of the latents. As in transformers, it does not depend on the model's ``norm_eps``."""

Widths = tuple[int, int, int]
"""The widths r, n, and v, in this order."""


class LatentAttention(nn.Module):
    """Causal self-attention that projects hidden states down to latents, and latents up to keys and values.

    With ``q_lora_rank``, queries are computed from latents too. The r key channels with rotary embeddings are the same
    for all heads.
    """

    def __init__(self, config: ModelConfig, rotates: bool = True) -> None:
        super().__init__()
        heads, hidden, of_queries = config.num_attention_heads, config.hidden_size, config.q_lora_rank
        plain, rotated = heads * config.qk_nope_head_dim, heads * config.qk_rope_head_dim
        latents = {"q_a_proj": of_queries} if of_queries else {}
        self.down = Linears(
            hidden, False, **latents, kv_a_proj=config.kv_lora_rank, k_rope_proj=config.qk_rope_head_dim
        )
        self.q_a_layernorm = latent_norm(config, of_queries) if of_queries else None
        self.kv_a_layernorm = latent_norm(config, config.kv_lora_rank)
        self.q = Linears(of_queries or hidden, False, q_nope_proj=plain, q_rope_proj=rotated)
        self.kv = Linears(config.kv_lora_rank, False, k_nope_proj=plain, v_proj=heads * config.v_head_dim)
        self.core = LatentCore(config, rotates)
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=False)

    def forward(self, x_BSH: Tensor, context: AttentionContext) -> Tensor:
        *q_latents_BSc, kv_latents_BSc, k_rope_BSr = self.down(x_BSH)
        q_reads = x_BSH if self.q_a_layernorm is None else self.q_a_layernorm(*q_latents_BSc)
        queries, keys_and_values = self.q(q_reads), self.kv(self.kv_a_layernorm(kv_latents_BSc))
        out_BSH: Tensor = self.o_proj(self.core(*queries, k_rope_BSr, *keys_and_values, context))
        return out_BSH


def latent_norm(config: ModelConfig, width: int) -> RMSNorm:
    return RMSNorm(width, LATENT_EPS, config.zero_centered_norm, config.norm_rounds_last)


class LatentCore(AttentionCore):
    """The attention core of latent attention. Value heads may have fewer channels than key heads."""

    def __init__(self, config: ModelConfig, rotates: bool = True) -> None:
        super().__init__(config, rotates)
        self.widths = (config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)

    @recomputable
    def forward(  # type: ignore[override]  # the core of latent attention has other inputs
        self, q_nope: Tensor, q_rope: Tensor, k_rope: Tensor, k_nope: Tensor, v: Tensor, context: AttentionContext
    ) -> Tensor:
        out = self.attend_heads(*join_channels(q_nope, q_rope, k_rope, k_nope, v, self.widths), context)
        return without_padding(out, self.widths)


def join_channels(
    q_nope_BSf: Tensor, q_rope_BSf: Tensor, k_rope_BSr: Tensor, k_nope_BSf: Tensor, v_BSf: Tensor, widths: Widths
) -> tuple[Tensor, Tensor, Tensor]:
    """Build queries, keys, and values for ``AttentionCore`` from the outputs of the projections.

    In each query and key head, the channels with rotary embeddings come first. Attention kernels need values as wide as
    keys, so zeros pad the values.

    Returns:
        Queries, keys, and values, [B, S, N·(r + n)] each.
    """
    rope, nope, values = widths
    q_rope, q_nope = q_rope_BSf.unflatten(-1, (-1, rope)), q_nope_BSf.unflatten(-1, (-1, nope))
    k_nope, v = k_nope_BSf.unflatten(-1, (-1, nope)), v_BSf.unflatten(-1, (-1, values))
    k_rope = k_rope_BSr[:, :, None].expand(-1, -1, k_nope.shape[2], -1)
    q, k = torch.cat([q_rope, q_nope], -1), torch.cat([k_rope, k_nope], -1)
    return q.flatten(-2), k.flatten(-2), F.pad(v, (0, rope + nope - values)).flatten(-2)


def without_padding(out_BSf: Tensor, widths: Widths) -> Tensor:
    """Return the heads' outputs [B, S, N·v], without the padding that ``join_channels`` has added to the values."""
    rope, nope, values = widths
    heads_BSNv: Tensor = out_BSf.unflatten(-1, (-1, rope + nope))[..., :values]
    return heads_BSNv.flatten(-2)
