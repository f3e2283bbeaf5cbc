"""Sliding-window layers in a config.json get the same types and rotary bases as in transformers. Malformed lists of
layers are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import model_of
from fourfold.huggingface.architectures.families import FAMILIES
from fourfold.huggingface.architectures.written_config import config_of

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
}
S, F = "sliding_attention", "full_attention"
OF_FAMILY: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 4]]},
    "mellum": {"layer_types": [F, S] * 4},  # Without the list, no layer slides.
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "max_window_layers": 4},
}
"""For families whose defaults assume another number of layers: keys that give some of 8 layers a sliding window."""
ONE_FULL_LAYER: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global"], 1]]},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "flint": {"mlp_only_layers": []},
    "exaone_moe": {"mlp_layer_types": ["sparse"]},
}
"""Keys for a model with one layer, which has full attention, and experts if the family has experts."""
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gemma2", {"sliding_window_pattern": 3, "head_dim": 8}),
        ("olmo3", {"sliding_window_pattern": 2}),
        ("olmo3", {"rope_theta": 1e6}),
        ("olmo3", {"rope_theta": 1e6, "rope_scaling": YARN}),
        ("olmo3", {"rope_parameters": {F: {"rope_type": "default", "rope_theta": 1e6}}}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("gemma3_text", {"rope_theta": 1e5, "rope_local_base_freq": 300.0}),
        ("gemma3_text", {"rope_parameters": {F: {"rope_type": "default", "rope_theta": 1e5}}}),
        ("ministral", {}),
        ("ministral", {"use_sliding_window": False}),  # transformers reads this key only in Qwen's families.
        ("vaultgemma", {}),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 6}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
    ],
    ids=str,
)
def test_layers_slide_as_in_transformers(kind: str, keys: dict[str, Any]) -> None:
    config = {"model_type": kind, **SIZES, **keys}
    model = model_of(config, "config.json")
    theirs = transformers.AutoConfig.for_model(**config)
    assert [model.type_of(layer) for layer in range(8)] == theirs.layer_types
    ropes = theirs.rope_parameters
    assert model.rope_theta == ropes.get(F, ropes)["rope_theta"]
    assert (model.rope_local_base_freq or model.rope_theta) == ropes.get(S, ropes)["rope_theta"]
    assert model_of(config_of(model, kind), "config.json") == model


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.slides])
def test_use_sliding_window_counts_only_if_transformers_reads_it_for_the_family(kind: str) -> None:
    """In a Mistral model, for example, every layer slides, whatever this key says."""
    config = {"model_type": kind, **SIZES, "sliding_window": 8, "use_sliding_window": False, **OF_FAMILY.get(kind, {})}
    is_read = hasattr(transformers.CONFIG_MAPPING[kind](), "use_sliding_window")
    assert (model_of(config, "config.json").sliding_layers == 0) == is_read


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.lists_layer_types])
def test_models_without_sliding_layers_are_written_for_transformers(kind: str) -> None:
    """For some families, transformers always makes the masks of both types of layers, and needs a window size for
    that."""
    sizes = {**SIZES, "num_hidden_layers": 1, "layer_types": [F], "vocab_size": 32, "moe_intermediate_size": 8}
    config = {"model_type": kind, **sizes, "sliding_window": None, **ONE_FULL_LAYER.get(kind, {})}
    model = model_of(config, "config.json")
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config_of(model, kind)))
    assert theirs(torch.arange(4)[None]).logits.shape == (1, 4, 32)


@pytest.mark.parametrize(
    ("kind", "keys", "says"),
    [
        ("mistral", {"num_hidden_layers": "8"}, "num_hidden_layers = '8' is not an integer of at least 1"),
        ("mistral", {"num_hidden_layers": 0}, "num_hidden_layers = 0 is not an integer of at least 1"),
        ("mistral", {"num_hidden_layers": 10**9}, "supports at most 10000"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0 is not an integer of at least 1"),
        ("gemma3_text", {"sliding_window_pattern": None}, "sliding_window_pattern = None is not an integer"),
        ("gemma3_text", {"sliding_window_pattern": "2"}, "sliding_window_pattern = '2' is not an integer"),
        ("qwen2", {"max_window_layers": None}, "max_window_layers = None is not an integer of at least 0"),
        ("qwen2_moe", {"max_window_layers": "2"}, "max_window_layers = '2' is not an integer of at least 0"),
        ("gemma2", {"layer_types": [[S]] * 8}, r"layer_types = \[\['sliding_attention'\]"),
        ("gemma2", {"layer_types": S}, "layer_types = 'sliding_attention'; fourfold supports"),
        (
            "mistral",
            {"sliding_window": 8, "layer_types": [F, S] * 4},
            "sliding_window applies to every layer of model_type",
        ),
        ("mistral", {"sliding_window": 8, "layer_types": [F] * 8}, "sliding_window = null if no layer has a window"),
        ("qwen3_moe", {"mlp_only_layers": [*range(8)]}, r"mlp_only_layers = \[.*\] with num_hidden_layers = 8;"),
        ("qwen3_moe", {"mlp_only_layers": [*range(9)]}, r"mlp_only_layers = \[.*\] with num_hidden_layers = 8;"),
        ("qwen3_moe", {"num_hidden_layers": 0}, "num_hidden_layers = 0 is not an integer of at least 1"),
        ("olmo3", {"rope_parameters": {S: "default"}}, "rotary embeddings of sliding layers are 'default'"),
        ("olmo3", {"rope_parameters": {F: "default"}}, "the rotary embeddings of full layers are 'default'"),
        ("olmo3", {"rope_parameters": {S: {"rope_theta": "a"}}}, "rope_theta of sliding layers = 'a' is not a number"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters has no table of 'full_attention'"),
        ("gemma3_text", {"rope_local_base_freq": 0}, "the rope_theta of sliding layers, 0, is not above 1"),
        ("gemma3_text", {"rope_local_base_freq": 0.5}, "the rope_theta of sliding layers, 0.5, is not above 1"),
    ],
    ids=str,
)
def test_malformed_layers_are_refused(kind: str, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        model_of({"model_type": kind, **SIZES, "use_sliding_window": True, **keys}, "config.json")
