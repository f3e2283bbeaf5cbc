"""Count the parameters of a decoder, given its sizes."""

from fourfold.config.model import ModelConfig
from fourfold.errors import UserError

MOST_PARAMETERS = 2**58
"""Largest number of parameters. A larger model's size in bytes would overflow 64 bits."""


def check_countable(model: ModelConfig) -> None:
    """Raise ``UserError`` if the model has more than ``MOST_PARAMETERS`` parameters."""
    if num_parameters(model) > MOST_PARAMETERS:
        raise UserError(
            f"a model with {num_parameters(model):.2g} parameters is too large for any machine; make "
            f"model.hidden_size = {model.hidden_size} or model.num_hidden_layers = {model.num_hidden_layers} smaller"
        )


def num_parameters(model: ModelConfig) -> int:
    """Return the model's number of parameters, including the padding of the vocabulary. Tied weights count once."""
    hidden = model.hidden_size
    embeddings = model.padded_vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    if model.position_embedding == "learned":
        embeddings += model.max_position_embeddings * hidden
    norm = hidden * (2 if model.norm == "layernorm" else 1)
    dense, linear = model.num_hidden_layers - model.sparse_layers, model.linear_layers
    layers = dense * (_attention_and_norms(model) + _mlp(model)) + model.sparse_layers * parameters_per_layer(model)
    later = model.num_nextn_predict_layers * _prediction_layer(model, norm)
    return embeddings + norm + layers + linear * (_linear_attention(model) - _attention(model)) + later


def _prediction_layer(model: ModelConfig, norm: int) -> int:
    """Return the number of parameters of one layer for multi-token prediction. A norm has ``norm`` parameters."""
    is_linear = model.type_of(model.num_hidden_layers - 1) == "linear_attention"
    attention = _linear_attention(model) - _attention(model) if is_linear else 0
    return parameters_per_layer(model) + attention + 2 * model.hidden_size**2 + 3 * norm


def parameters_per_layer(model: ModelConfig) -> int:
    """Return the number of parameters of one layer with ordinary (not linear) attention. For an MoE model, return the
    number for a layer with experts."""
    return _attention_and_norms(model) + (_mixture(model, model.num_experts) if model.num_experts else _mlp(model))


def active_parameters_per_layer(model: ModelConfig) -> int:
    """Return how many parameters of one layer each token uses.

    For an MoE model, return the number for a layer with experts, and count only the experts that a token is routed to.
    """
    return _attention_and_norms(model) + (
        _mixture(model, model.num_experts_per_tok) if model.num_experts else _mlp(model)
    )


def _attention_and_norms(model: ModelConfig) -> int:
    norm = model.hidden_size * (2 if model.norm == "layernorm" else 1)
    return _attention(model) + (4 if model.norm_placement == "around" else 2) * norm


def _attention(model: ModelConfig) -> int:
    hidden = model.hidden_size
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    gate = queries * model.attention_output_gate
    attention = hidden * (queries + 2 * keys + gate) + queries * hidden
    if model.kv_lora_rank:
        values, latents = model.num_attention_heads * model.v_head_dim, model.q_lora_rank + model.kv_lora_rank
        plain = model.num_attention_heads * model.qk_nope_head_dim
        attention = hidden * (latents + model.qk_rope_head_dim) + latents + queries * (model.q_lora_rank or hidden)
        attention += model.kv_lora_rank * (plain + values) + values * hidden
    attention += (queries + 2 * keys + gate) * model.attention_bias + hidden * model.attention_output_bias
    attention += model.num_attention_heads * model.attention_sinks
    normed = queries + keys if model.qk_norm_over == "all_heads" else 2 * model.head_dim
    return attention + normed * model.qk_norm


def _linear_attention(model: ModelConfig) -> int:
    heads = model.linear_num_value_heads
    channels = 2 * model.linear_num_key_heads * model.linear_key_head_dim + heads * model.linear_value_head_dim
    of_heads = 2 * heads + model.linear_value_head_dim
    return linear_attention_matrices(model) + channels * model.linear_conv_kernel_dim + of_heads


def linear_attention_matrices(model: ModelConfig) -> int:
    """Return the number of weight entries in the matrices of a layer's linear attention."""
    heads = model.linear_num_value_heads
    keys, values = model.linear_num_key_heads * model.linear_key_head_dim, heads * model.linear_value_head_dim
    return model.hidden_size * (2 * keys + 3 * values + 2 * heads)


def _mlp(model: ModelConfig) -> int:
    hidden, inner, ups = model.hidden_size, model.intermediate_size, 2 if model.gated_mlp else 1
    return (ups + 1) * hidden * inner + (ups * inner + hidden) * model.mlp_bias


def _mixture(model: ModelConfig, experts: int) -> int:
    """Return the number of parameters of an MoE layer's router, ``experts`` of its experts, and its shared expert."""
    hidden, shared = model.hidden_size, model.shared_expert_intermediate_size
    width = experts * model.moe_intermediate_size + shared
    router = model.num_experts * (hidden + model.router_bias + model.mlp_bias)
    biases = (2 * width + hidden * (experts + (shared > 0))) * model.mlp_bias
    return router + 3 * hidden * width + biases + hidden * model.shared_expert_gate
