"""Keys of a model that follow from other keys: types of layers, bases of rotary frequencies, and scales."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fourfold.config.model import ModelConfig
from fourfold.config.parameter_counts import num_parameters
from fourfold.models.transformer import parameter_shapes

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}
S, F, D = "sliding_attention", "full_attention", "linear_attention"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], [S]),
        ([S], [S]),
        ([S, S], [S]),
        ([S, S, F], [S, S, F]),
        ([S, S, F, S, S, F], [S, S, F]),
        ([S, F, F, S], [S, F, F, S]),
        ([F, F, F, F, S, S, S, S], [F, F, F, F, S, S]),
    ],
    ids=str,
)
def test_kinds_of_layers_repeat(given: list[str], kept: list[str]) -> None:
    model = ModelConfig(**SIZES, sliding_window=8, layer_types=given)
    assert model.layer_types == kept
    expected = ((given or [S]) * 6)[:6]
    assert [model.type_of(layer) for layer in range(6)] == expected
    assert model.sliding_layers == expected.count(S)


def test_without_a_window_no_layer_slides() -> None:
    for keys in ({"layer_types": [F, F]}, {"layer_types": [F] * 6 + [S], "sliding_window": 8}):
        model = ModelConfig(**SIZES, **keys)
        assert model.layer_types == [] and model.kinds_of_layers == [F]
        assert model.sliding_layers == model.sliding_window == 0


def test_a_local_rotary_base_equal_to_rope_theta_counts_as_unset() -> None:
    window = {"sliding_window": 8, "rope_local_base_freq": 10000.0}
    assert ModelConfig(**SIZES, **window).rope_local_base_freq == 0
    stretched = ModelConfig(**SIZES, **window, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert stretched.rope_local_base_freq == 10000.0


LINEAR = {
    "layer_types": [D, F],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def test_layers_with_linear_attention_repeat() -> None:
    model = ModelConfig(**SIZES, **LINEAR | {"layer_types": [D, D, F] * 2})
    assert model.layer_types == [D, D, F] and model.linear_layers == 4 and model.sliding_layers == 0
    assert [model.type_of(layer) for layer in range(6)] == [D, D, F] * 2
    slid = ModelConfig(**SIZES, **LINEAR | {"layer_types": [D, S], "sliding_window": 8})
    assert slid.linear_layers == slid.sliding_layers == 3
    only = ModelConfig(**SIZES, **LINEAR | {"layer_types": [D], "sliding_window": 8})
    assert only.linear_layers == 6 and only.sliding_window == 0


LATENTS = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"layer_types": [S]}, "layer_types = .'sliding_attention'. needs model.sliding_window"),
        (
            {"rope_local_base_freq": 0.5, "sliding_window": 4},
            "rope_local_base_freq = 0.5 must be 0 or above 1; 10000.0 works",
        ),
        ({"rope_local_base_freq": 500.0}, "rope_local_base_freq = 500.0 has no effect with model.sliding_window = 0"),
        (
            {"rope_local_base_freq": 500.0, "position_embedding": "learned", "sliding_window": 4},
            "rope_local_base_freq = 500.0 has no effect with model.position_embedding = 'learned'",
        ),
        (
            {"norm_placement": "after", "parallel_residual": True},
            "norm_placement = 'after' has no effect with model.parallel_residual = true",
        ),
        ({"q_lora_rank": 8}, "q_lora_rank = 8 has no effect with model.kv_lora_rank = 0"),
        ({"kv_lora_rank": 16}, "kv_lora_rank = 16 needs qk_nope_head_dim; qk_nope_head_dim = 64 works"),
        (LATENTS | {"qk_rope_head_dim": 3}, "qk_rope_head_dim = 3 is odd, but must be even; 64 works"),
        (LATENTS | {"v_head_dim": 20}, r"v_head_dim = 20 is above qk_nope_head_dim \+ qk_rope_head_dim = 12; 12 works"),
        (LATENTS | {"head_dim": 16}, "head_dim = 16 does not work with kv_lora_rank = 16; head_dim = 12 works"),
        (LATENTS | {"qk_norm": True}, "qk_norm = true does not work with kv_lora_rank = 16; qk_norm = false works"),
        (
            LATENTS | LINEAR,
            "linear_num_key_heads = 2 does not work with kv_lora_rank = 16; linear_num_key_heads = 0 works",
        ),
        (LATENTS | {"attention_output_gate": True}, "attention_output_gate = true does not work with kv_lora_rank"),
        ({"layer_types": [D]}, "layer_types = .'linear_attention'. needs linear_num_key_heads; .* = 16 works"),
        (
            {key: value for key, value in LINEAR.items() if key != "linear_value_head_dim"},
            "needs linear_value_head_dim; linear_value_head_dim = 16 works",
        ),
        ({"linear_key_head_dim": 8}, "linear_key_head_dim = 8 has no effect without a linear_attention layer; leave"),
        (
            LINEAR | {"linear_num_value_heads": 5},
            "linear_num_key_heads = 2 does not divide linear_num_value_heads = 5; linear_num_key_heads = 1 works",
        ),
        (MIXTURE | {"n_group": 3}, "n_group = 3 must split num_experts = 8 into groups of at least 1; 1 works"),
        (
            MIXTURE | {"n_group": 8, "topk_group": 4, "router_score": "sigmoid"},
            "n_group = 8 must split num_experts = 8 into groups of at least 2; 1 works",
        ),
        (
            MIXTURE | {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            "topk_group = 1 must be 2 to n_group = 4 for num_experts_per_tok = 3 of num_experts = 8; topk",
        ),
    ],
)
def test_contradictions_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ModelConfig(**SIZES, **keys)


@pytest.mark.parametrize("keys", [{}, LINEAR, {"attention_output_gate": True, "attention_bias": True}], ids=str)
@pytest.mark.parametrize("placement", ["before", "after", "around"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_parameter_counts_equal_the_decoders(placement: str, norm: str, keys: dict[str, Any]) -> None:
    model = ModelConfig(**SIZES, norm_placement=placement, norm=norm, **keys)
    sizes = [rows * (columns[0] if columns else 1) for rows, *columns in parameter_shapes(model).values()]
    assert num_parameters(model) == sum(sizes)
