"""List faults in features that only some model families have: windows, norms of outputs, two kinds of rotary tables,
and soft caps."""

from __future__ import annotations

from mutants import CP2, ONE_SEQUENCE, TWO_PARTS, ULYSSES, X2, Y2, Mutant
from tiny_runs import ARCEE, EXAONE4, GEMMA2, GEMMA3, GRANITE, OLMO2, SLIDING, SMOLLM3

WINDOWS = [
    Mutant(
        "the sliding window is one token too long",
        "parallel.attention.document_attention:_mask_of_piece",
        "before - window + 1",
        "before - window",
        SLIDING,
    ),
    Mutant(
        "a chunk of queries misses the first key of its sliding window",
        "parallel.attention.document_attention:pieces_of",
        "begin - window + 1",
        "begin - window + 2",
        SLIDING,
    ),
    Mutant(
        "the attention mask's sliding window is one token too short",
        "models.causal_attention:causal_within",
        "same_BSS.tril().triu(1 - window)",
        "same_BSS.tril().triu(2 - window)",
        GEMMA2 | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
        {"x": 2, "y": 2},
        ONE_SEQUENCE,
    ),
    Mutant(
        "Ulysses ignores the sliding window",
        "parallel.attention.attention:SharedAttentionCore.attend",
        "options = (document_ends_BE, self.scale, window, self.softcap)",
        "options = (document_ends_BE, self.scale, 0, self.softcap)",
        SLIDING,
        ULYSSES,
    ),
    Mutant(
        "ring attention ignores the sliding window",
        "parallel.attention.ring:block_of_step",
        "ours_1Q[:, :, None] - theirs_1K[:, None, :] < window",
        "ours_1Q[:, :, None] - theirs_1K[:, None, :] < length",
        SLIDING,
        CP2,
    ),
    Mutant(
        "ring attention skips ranks with keys inside the sliding window",
        "parallel.attention.ring:block_of_step",
        "(abs(source - cp.rank) - 1) * half + 1 >= window",
        "(abs(source - cp.rank) - 0) * half + 1 >= window",
        SLIDING,
        CP2,
    ),
    Mutant(
        "all layers have the attention type of the first layer",
        "models.transformer:BlockStack.forward",
        "contexts[block.layer_type]",
        "contexts[next(iter(contexts))]",
        GEMMA2,
    ),
]

NORMS = [
    Mutant(
        "the norm after attention also normalizes the residual stream",
        "models.transformer:AttentionAndMLP.add_outputs",
        "torch.add( x_BSH, normed(self.self_attn(normed(x_BSH, self.input_layernorm), context), "
        "self.attention_output_layernorm), alpha=self.residual_multiplier )",
        "normed( x_BSH + self.self_attn(normed(x_BSH, self.input_layernorm), context), "
        "self.attention_output_layernorm )",
        OLMO2,
        Y2,
    ),
    Mutant(
        "norms multiply by weight, not by 1 + weight",
        "parallel.tensor.norm:_Normalize.forward",
        "1 + weight.float()",
        "weight.float()",
        GEMMA3,
        X2,
    ),
]

TABLES = [
    Mutant(
        "full-attention layers use the rotary base of sliding-window layers",
        "models.causal_attention:AttentionTables.forward",
        "slides and config.rope_local_base_freq > 0",
        "not slides and config.rope_local_base_freq > 0",
        GEMMA3,
        X2,
    ),
    Mutant(
        "RoPE scaling also changes the frequencies of sliding-window layers",
        "models.rope:rope_frequencies",
        "scaling = None if local else config.rope_scaling",
        "scaling = config.rope_scaling",
        GEMMA3,
    ),
]

CAPS = [
    Mutant(
        "the gradient of the logits ignores the logits' cap",
        "parallel.tensor.head:cross_entropy",
        "gradient_mv.mul_(slopes_mv)",
        "gradient_mv",
        GEMMA2,
        X2,
    ),
    Mutant(
        "the gradient of attention scores ignores the scores' cap",
        "parallel.attention.block_attention:_differentiate_capped",
        "weights * ((grad @ v.mT).to(precise) - projected) * slopes",
        "weights * ((grad @ v.mT).to(precise) - projected)",
        GEMMA2,
        CP2,
    ),
    Mutant(
        "attention scores are divided by the square root of head_dim, not of query_pre_attn_scalar",
        "models.causal_attention:AttentionCore.__init__",
        "config.attention_multiplier",
        "config.head_dim**-0.5",
        GEMMA2,
    ),
]

FACTORS = [
    Mutant(
        "embeddings are not multiplied by embedding_multiplier",
        "models.transformer:Transformer._embed_tokens",
        "x_BSH * self.config.embedding_multiplier",
        "x_BSH",
        GRANITE,
        X2,
    ),
    Mutant(
        "logits are multiplied by logits_scaling, not divided by it",
        "models.transformer:Transformer._for_head",
        "x_BSH / self.config.logits_scaling",
        "x_BSH * self.config.logits_scaling",
        GRANITE,
        X2,
    ),
    Mutant(
        "the MLP's output is not multiplied by residual_multiplier",
        "models.transformer:AttentionAndMLP.add_outputs",
        "torch.add(attended_BSH, normed(mlp_BSH, self.mlp_output_layernorm), alpha=self.residual_multiplier)",
        "torch.add(attended_BSH, normed(mlp_BSH, self.mlp_output_layernorm))",
        GRANITE,
        Y2,
    ),
    Mutant(
        "with batch parts, residual_multiplier multiplies the residual stream, not attention's output",
        "parallel.overlap.batch_parts:BlockInParts.steps",
        "torch.add(x_BTh, normed(out_BTh, self.attention_output_layernorm), alpha=alpha)",
        "torch.add(normed(out_BTh, self.attention_output_layernorm), x_BTh, alpha=alpha)",
        GRANITE,
        X2,
        TWO_PARTS,
    ),
    Mutant(
        "with batch parts, the MLP's output is not multiplied by residual_multiplier",
        "parallel.overlap.batch_parts:BlockInParts.steps",
        "torch.add(attended_BTh, normed(mlp_BTh, self.mlp_output_layernorm), alpha=alpha)",
        "torch.add(attended_BTh, normed(mlp_BTh, self.mlp_output_layernorm))",
        GRANITE,
        X2,
        TWO_PARTS,
    ),
    Mutant(
        "with batch parts, a recomputed MLP's output is not multiplied by residual_multiplier",
        "parallel.overlap.batch_parts:BlockInParts.steps",
        "torch.add(attended_BTh, normed(self.mlp.down(*up_BSf), self.mlp_output_layernorm), alpha=alpha)",
        "torch.add(attended_BTh, normed(self.mlp.down(*up_BSf), self.mlp_output_layernorm))",
        GRANITE,
        X2,
        TWO_PARTS | {"activation_checkpoint": {"mode": "selective", "modules": ["mlp"]}},
    ),
    Mutant(
        "attention scores are divided by the square root of head_dim, not multiplied by attention_multiplier",
        "models.causal_attention:AttentionCore.__init__",
        "self.scale, self.softcap = config.attention_multiplier, config.attn_logit_softcapping",
        "self.scale, self.softcap = config.query_pre_attn_scalar**-0.5, config.attn_logit_softcapping",
        GRANITE,
        CP2,
    ),
]

POSITIONS = [
    Mutant(
        "every layer applies rotary embeddings, even if the model excludes the layer",
        "models.causal_attention:AttentionCore.attend_heads",
        "self.rotates and context.cos_BS1d is not None and context.sin_BS1d is not None",
        "context.cos_BS1d is not None and context.sin_BS1d is not None",
        SMOLLM3,
        CP2,
    ),
    Mutant(
        "on the grid, every layer applies rotary embeddings, even if the model excludes the layer",
        "parallel.attention.attention:SharedAttentionCore.__init__",
        "super().__init__(core.config, core.rotates)",
        "super().__init__(core.config)",
        SMOLLM3,
        X2,
    ),
    Mutant(
        "a pipeline stage counts its layers from 0 when it looks up which layers apply rotary embeddings",
        "models.transformer:attention_of",
        "config.rotates(number)",
        "config.rotates(number % 2)",
        SMOLLM3,
        {"pp": 2},
        ONE_SEQUENCE,
    ),
    Mutant(
        "rotary embeddings are applied in full-attention layers, not in sliding-window layers",
        "config.model:ModelConfig.rotates",
        "not self.no_rope_layers[layer % len(self.no_rope_layers)]",
        "bool(self.no_rope_layers[layer % len(self.no_rope_layers)])",
        EXAONE4,
        X2,
    ),
]

ACTIVATIONS = [
    Mutant(
        "the ReLU is not squared",
        "models.mlp:_SquaredReLU.forward",
        "F.relu(x).square_()",
        "F.relu(x)",
        ARCEE,
        X2,
    ),
    Mutant(
        "the squared ReLU also squares negative inputs",
        "models.mlp:_SquaredReLU.forward",
        "F.relu(x).square_()",
        "x.square()",
        ARCEE,
        Y2,
    ),
    Mutant(
        "the gradient of the squared ReLU is half as large as it should be",
        "models.mlp:_SquaredReLU.backward",
        "slope.mul_(2).mul_(grad)",
        "slope.mul_(grad)",
        ARCEE,
        X2,
    ),
]

FAMILIES = [*WINDOWS, *NORMS, *TABLES, *CAPS, *FACTORS, *POSITIONS, *ACTIVATIONS]
