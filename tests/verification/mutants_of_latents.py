"""Faults in latent attention and in the choice of experts by groups."""

from __future__ import annotations

from mutants import CP2, FULL, LORA, ONE_SEQUENCE, PACKED, SIX_HEADS, X2, X2Y2, Y2, Mutant
from tiny_runs import DEEPSEEK_V2, DEEPSEEK_V3, YOUTU

YARN = {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    }
}
SIX = YOUTU | SIX_HEADS | {"num_key_value_heads": 6, "head_dim": 12}

LATENTS = [
    Mutant(
        "the gradient of the key that heads share is not summed over x",
        "parallel.attention.latent_core:SharedLatentCore._for_my_heads",
        'gather(k_rope, self.x, self.token_dim, "attention: shared key")',
        "__import__('fourfold.parallel.grid.communicate', fromlist=['x'])."
        "whole(k_rope, self.x, self.token_dim, 'attention: shared key')",
        YOUTU,
        X2,
    ),
    Mutant(
        "the gradient of the key that heads share is not summed over y",
        "parallel.attention.latent_core:SharedLatentCore._for_my_heads",
        'gather(k_rope, self.y, 2, "attention: shared key")',
        "__import__('fourfold.parallel.grid.communicate', fromlist=['x'])."
        "whole(k_rope, self.y, 2, 'attention: shared key')",
        YOUTU,
        Y2,
    ),
    Mutant(
        "the projections to latents get only the gradient of one x rank's tokens",
        "parallel.attention.latent_core:LatentLinear.weight_tile",
        'Tile(y=1, partial_over=("x",))',
        "Tile(y=1)",
        YOUTU,
        X2,
    ),
    Mutant(
        "a LoRA adapter of the projections to latents gets only the gradient of one x rank's tokens",
        "parallel.tensor.matmuls:adapter_tiles",
        '("y",) if weight.x == 0 else ("x", "y")',
        '("y",)',
        YOUTU,
        X2,
        LORA,
    ),
    Mutant(
        "if y splits the sequences, every rank uses the shared key of the first sequences",
        "parallel.attention.latent_core:SharedLatentCore._for_my_heads",
        "k_rope.chunk(self.y.size, self.shared_dim)[self.y.rank]",
        "k_rope.chunk(self.y.size, self.shared_dim)[0]",
        SIX,
        X2Y2,
        PACKED,
    ),
    Mutant(
        "if y splits the queries, every rank uses the shared key of the first tokens",
        "parallel.attention.latent_core:SharedLatentCore._for_my_heads",
        "k_rope.chunk(self.y.size, self.shared_dim)[self.y.rank]",
        "k_rope.chunk(self.y.size, self.shared_dim)[0]",
        SIX,
        X2Y2,
        ONE_SEQUENCE,
    ),
    Mutant(
        "attention scores lack YaRN's factor from mscale_all_dim",
        "models.causal_attention:AttentionCore.__init__",
        "config.attention_multiplier",
        "config.query_pre_attn_scalar**-0.5",
        YOUTU | YARN,
    ),
    Mutant(
        "YaRN's factor on cos and sin ignores mscale",
        "models.rope:rope_frequencies",
        "scaling.yarn_scale(scaling.mscale) / scaling.yarn_scale(scaling.mscale_all_dim)",
        "scaling.yarn_scale(1.0)",
        YOUTU | YARN,
    ),
    Mutant(
        "the norms of latents use the model's norm_eps, not their own eps",
        "models.latent_attention:latent_norm",
        "LATENT_EPS",
        "config.norm_eps",
        YOUTU | {"norm_eps": 1e-3},
    ),
    Mutant(
        "the channels of keys are joined in a different order than the channels of queries",
        "models.latent_attention:join_channels",
        "torch.cat([k_rope, k_nope], -1)",
        "torch.cat([k_nope, k_rope], -1)",
        YOUTU,
    ),
    Mutant(
        "values are padded at the first channels, not at the last",
        "models.latent_attention:join_channels",
        "F.pad(v, (0, rope + nope - values))",
        "F.pad(v, (rope + nope - values, 0))",
        YOUTU,
        CP2,
    ),
    Mutant(
        "the rotary channels of queries and keys are not rotated",
        "models.latent_attention:LatentAttention.__init__",
        "LatentCore(config, rotates)",
        "LatentCore(config, False)",
        YOUTU,
        X2,
        FULL,
    ),
    Mutant(
        "a group of experts is rated by its best expert, not by its best two",
        "models.mixture:Choice.experts",
        "2 if self.sigmoid else 1",
        "1",
        DEEPSEEK_V3,
    ),
    Mutant(
        "the router also chooses experts from groups outside its top groups",
        "models.mixture:Choice.experts",
        "by_group_TGe.masked_fill(is_left_out_TG[..., None], -torch.inf)",
        "by_group_TGe",
        DEEPSEEK_V3,
    ),
    Mutant(
        "groups of experts are rated without the experts' biases",
        "models.mixture:Choice.experts",
        "by_group_TGe.topk(2 if self.sigmoid else 1, dim=-1)",
        "scores_TE.unflatten(-1, (self.groups, -1)).topk(2 if self.sigmoid else 1, dim=-1)",
        DEEPSEEK_V3,
        {},
        {"moe": {"bias_update_rate": 0.5}},
    ),
    Mutant(
        "the softmax weights of a token's experts are normalized to a sum of 1, although norm_topk_prob is false",
        "models.mixture:Choice.weights",
        "if self.normalize:\n    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)",
        "weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)",
        DEEPSEEK_V2,
    ),
]
