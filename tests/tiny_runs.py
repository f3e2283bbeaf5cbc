"""Small runs for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.data.loader import Loader, MicroBatch
from fourfold.run_file.load import make_run
from fourfold.verification.batches import RandomSamples

LLAMA = {"preset": "llama-tiny"}
"""A Llama. 8 query heads share 4 key-value heads. The embedding is not tied, and the vocabulary has an odd size (257,
padded to 384)."""

GPT = {"preset": "gpt-tiny", "vocab_size": 301}
"""A GPT with a tied embedding, biases, learned positions, and LayerNorm."""

QWEN = {
    "preset": "llama-tiny",
    "num_key_value_heads": 2,
    "qk_norm": True,
    "attention_bias": True,
    "tie_word_embeddings": True,
}
"""A Qwen with QK-norm, attention biases, and a tied embedding. 8 query heads share 2 key-value heads."""

OLMO = QWEN | {"attention_bias": False, "qk_norm_over": "all_heads"}
"""A model whose QK-norm normalizes all heads of a token together."""

NEOX = {
    "preset": "gpt-tiny",
    "vocab_size": 301,
    "position_embedding": "rope",
    "partial_rotary_factor": 0.25,
    "parallel_residual": True,
    "gelu_approximation": "none",
    "tie_word_embeddings": False,
}
"""A GPT-NeoX. Attention and MLP get the same input, and a quarter of each head is rotated. The model has LayerNorm,
biases, and the exact GELU."""

GEMMA = {
    "preset": "llama-tiny",
    "num_key_value_heads": 1,
    "mlp": "geglu",
    "zero_centered_norm": True,
    "scale_embeddings": True,
    "tie_word_embeddings": True,
}
"""A Gemma. Its norms multiply by 1 + weight. It has scaled embeddings, a gated GELU, a tied embedding, and one
key-value head."""

SLIDING = {"preset": "llama-tiny", "sliding_window": 5}
"""A model like Mistral: every layer has a sliding window."""

OLMO2 = OLMO | {"norm_placement": "after", "tie_word_embeddings": False}
"""An OLMo 2 with norms after attention and MLP, and with a QK-norm over all heads."""

GEMMA2 = GEMMA | {
    "num_key_value_heads": 4,
    "norm_placement": "around",
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 0.7,
    "final_logit_softcapping": 0.9,
}
"""A Gemma 2 with norms before and after attention and MLP, and with a sliding window in every second layer. The caps of
scores and logits are so low that they change the results."""

GEMMA3 = GEMMA2 | {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "qk_norm": True,
    "rope_theta": 50000.0,
    "rope_local_base_freq": 300.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
}
"""A Gemma 3 with two kinds of rotary tables, with QK-norm, and without caps."""

GRANITE = LLAMA | {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
"""A Granite. It multiplies embeddings, scores, and the outputs of attention and MLP by factors, and divides the logits
by another factor."""

ARCEE = LLAMA | {"mlp": "relu2"}
"""A model whose MLP has a squared ReLU and no gate."""

STABLELM = LLAMA | {"norm": "layernorm", "partial_rotary_factor": 0.5}
"""A StableLM with a gated MLP, LayerNorm, and rotary embeddings on half of each head."""

SMOLLM3 = LLAMA | {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 0]}
"""A SmolLM3. One of its four layers has no position embeddings."""

EXAONE4 = OLMO2 | {
    "qk_norm_over": "head",
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}
"""An EXAONE 4 with norms after attention and MLP. Only its layers with a sliding window have rotary embeddings."""

DENSE: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt": GPT,
    "qwen": QWEN,
    "olmo": OLMO,
    "neox": NEOX,
    "gemma": GEMMA,
    "sliding": SLIDING,
    "olmo2": OLMO2,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "granite": GRANITE,
    "arcee": ARCEE,
    "exaone4": EXAONE4,
}
"""The dense models by short names."""

MIXTURE = {"preset": "llama-tiny", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
"""A Mixtral. The weights of a token's chosen experts are a softmax over these experts."""

QWEN_MOE = QWEN | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 40,
    "shared_expert_gate": True,
}
"""A Qwen MoE with a gated shared expert and a tied embedding. The weights of a token's experts do not sum to 1."""

DEEPSEEK = {
    "preset": "llama-tiny",
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "router_score": "sigmoid",
    "router_bias": True,
    "routed_scaling_factor": 2.5,
    "shared_expert_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
"""A DeepSeek with sigmoid scores, a router bias, a shared expert, and a dense first layer."""

GPT_OSS = MIXTURE | {
    "num_experts": 8,
    "intermediate_size": 48,
    "attention_sinks": True,
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "norm_rounds_last": True,
    "swiglu_limit": 0.1,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 100.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 1.0,
        "beta_slow": 0.1,
        "truncate": False,
    },
}
"""A GPT-OSS with sinks, biases in all layers, and a sliding window in every second layer. Half of the experts'
activations are clamped. The bounds of YaRN's scaling lie between channels."""

_LATENTS = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}

DEEPSEEK_V3 = DEEPSEEK | _LATENTS | {"n_group": 4, "topk_group": 2, "shared_expert_intermediate_size": 64}
"""A DeepSeek-V3 with latent attention. Its router first chooses groups of experts."""

DEEPSEEK_V2 = (
    {key: value for key, value in DEEPSEEK.items() if not key.startswith("router_")}
    | _LATENTS
    | {"q_lora_rank": 0, "norm_topk_prob": False, "shared_expert_intermediate_size": 32}
)
"""A DeepSeek-V2 with latent attention, but without latents for the queries. Its router has softmax scores."""

YOUTU = {"preset": "llama-tiny", "tie_word_embeddings": True} | _LATENTS
"""A dense model with latent attention and a tied embedding."""

HYBRID = {
    "preset": "llama-tiny",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "attention_output_gate": True,
    "zero_centered_norm": True,
    "qk_norm": True,
    "partial_rotary_factor": 0.25,
}
"""A model with Gated DeltaNets (two value heads per key head) and gated attention in turns."""

QWEN3_NEXT = HYBRID | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "shared_expert_gate": True,
    "norm_topk_prob": True,
}
"""A Qwen3-Next: ``HYBRID`` with experts and a gated shared expert."""


def tiny_run(model: dict[str, Any] = LLAMA, parallel: dict[str, int] | None = None, **sections: Any) -> RunConfig:
    """Return a run of 8 sequences of 32 tokens per step, with ``training`` and further sections merged over it."""
    training = {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "seq_length": 32,
        "train_steps": 10,
        **sections.pop("training", {}),
    }
    table = {"model": dict(model), "data": {"source": "python-stdlib"}, "parallel": parallel or {}, **sections}
    return make_run({**table, "training": training})


def random_global_batch(run: RunConfig, step: int) -> MicroBatch[Tensor]:
    """Return the global batch of a step as one batch of random samples. Each sample is one document."""
    samples, size = RandomSamples(run), run.training.global_batch_size
    (whole,) = Loader(samples, run.training.seq_length, size, size, 0, 1, samples.masks).step(step)
    return MicroBatch(whole.tokens, whole.labels).map(torch.from_numpy)
