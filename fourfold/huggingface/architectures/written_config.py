"""Write a Hugging Face config.json for a model of fourfold."""

from collections.abc import Mapping
from typing import Any

from fourfold.config.model import ModelConfig
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import CONFIG_FILE, NONE_IS_0, model_of
from fourfold.huggingface.architectures.families import FAMILIES
from fourfold.huggingface.architectures.family import ROPE_KEYS, TOPK_METHOD, Family
from fourfold.huggingface.architectures.rope_keys import FULL, SLIDING

NOT_COMPUTED = {"preset", "from_hf", "initializer_range", "pad_vocab_size_to_multiple_of"}
"""Keys of [model] that do not change what a model computes."""


def config_of(model: ModelConfig, kind: str | None = None) -> dict[str, Any]:
    """Return a config.json of the family ``kind`` for a model.

    If ``kind`` is None, use the first family that can compute the model.

    Raises:
        UserError: ``kind`` is unknown or computes something else, or no family computes what the model computes.
    """
    kinds = [kind] if kind is not None else list(FAMILIES)
    for each in kinds:
        if each not in FAMILIES:
            raise UserError(f"model_type '{each}' is not supported; supported are {', '.join(FAMILIES)}")
        config = _config(model, each)
        if same_model(model, config):
            return config
    which = f"of model_type '{kind}'" if kind else f"of any of {', '.join(FAMILIES)}"
    set_keys = model.model_dump(exclude_defaults=True, exclude=NOT_COMPUTED)
    computes = ", ".join(f"{key} = {value!r}" for key, value in set_keys.items())
    raise UserError(f"no Hugging Face model {which} computes the same as this model: {computes}")


def same_model(model: ModelConfig, config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes ``model``.

    Differences in ``preset``, ``from_hf``, ``initializer_range``, and the vocabulary padding do not count. Return False
    if the decoder cannot compute the config's model.
    """
    try:
        theirs = model_of(config, CONFIG_FILE)
    except UserError:
        return False
    return theirs.model_dump(exclude=NOT_COMPUTED) == model.model_dump(exclude=NOT_COMPUTED)


def _config(model: ModelConfig, kind: str) -> dict[str, Any]:
    family = FAMILIES[kind]
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": kind}
    # Without these keys, transformers would use the special token ids of the family's original model. This model's
    # vocabulary might not have these ids.
    config |= {key: family.defaults.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config |= {theirs: getattr(model, ours) for ours, theirs in family.keys.items()}
    config |= {key: None for key in NONE_IS_0 if config.get(key) == 0}
    config |= {key: values[0] for key, values in family.required.items()}
    for activation, ours in family.activations.items():
        if all(getattr(model, key) == value for key, value in ours.items()):
            config.setdefault(family.activation_key, activation)
    config |= {family.keys[key]: 1 / getattr(model, key) for key in family.reciprocals}
    layers = range(model.num_hidden_layers)
    if family.dense_layers == "mlp_only_layers":
        config["mlp_only_layers"] = list(range(model.first_k_dense_replace))
    if family.dense_layers == "mlp_layer_types":
        config["mlp_layer_types"] = ["sparse" if model.is_sparse(layer) else "dense" for layer in layers]
    if family.shared_experts is not None and model.num_experts:
        config[family.shared_experts] = model.shared_expert_intermediate_size // model.moe_intermediate_size
    if TOPK_METHOD in family.required and model.n_group > 1:
        config[TOPK_METHOD] = family.required[TOPK_METHOD][1]
    if model.position_embedding == "rope":
        config |= _their_rope(model, family)
    if family.rotating_layers == "listed":
        config["no_rope_layers"] = [int(model.rotates(layer)) for layer in layers]
    if family.rotating_layers == "with_theta":
        config["layer_rope_theta"] = [model.rope_theta * model.rotates(layer) for layer in layers]
    if family.has_linear_layers:
        config["layer_types"] = [model.type_of(layer) for layer in layers]
    if family.slides is not None:
        config |= _their_windows(model, family)
    return config


def _their_rope(model: ModelConfig, family: Family) -> dict[str, Any]:
    config: dict[str, Any] = {family.rope_theta: model.rope_theta}
    if family.architecture != "FalconForCausalLM":  # transformers derives head_dim for Falcon, and refuses the key.
        config["head_dim"] = model.qk_rope_head_dim or model.head_dim
    if family.partial_rotary_factor is not None:
        config[family.partial_rotary_factor] = model.partial_rotary_factor
    if model.rope_scaling is not None:
        kept = ("rope_type", *ROPE_KEYS[model.rope_scaling.rope_type])
        scaling = {key: getattr(model.rope_scaling, key) for key in kept}
        config["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}
    elif "rope_parameters" in family.defaults:  # Without rope_scaling, transformers would use the family's default.
        config["rope_scaling"] = {"rope_type": "default"}
    if family.rope_local_theta is not None and not family.reads_local_theta:
        of_full = config.get("rope_scaling", {"rope_type": "default"}) | {"rope_theta": model.rope_theta}
        local = {"rope_type": "default", "rope_theta": model.rope_local_base_freq or model.rope_theta}
        return {"rope_parameters": {FULL: of_full, SLIDING: local}}
    return config


def _their_windows(model: ModelConfig, family: Family) -> dict[str, Any]:
    slides = model.sliding_layers > 0
    if "attention_types" in family.defaults:
        kinds = ["local" if model.type_of(layer) == SLIDING else "global" for layer in range(model.num_hidden_layers)]
        return {"attention_types": [[kinds, 1]]}
    # If the file lists layer_types, transformers needs a window size, even if no layer slides. Exception: in some
    # families, full layers have rotary embeddings only if the file has no window.
    is_kept = family.lists_layer_types and family.rotating_layers != "sliding"
    unused = family.defaults["sliding_window"] if is_kept else None
    config: dict[str, Any] = {"sliding_window": model.sliding_window if slides else unused}
    if "use_sliding_window" in family.defaults:
        config["use_sliding_window"] = slides
    if family.reads_local_theta:
        config["rope_local_base_freq"] = model.rope_local_base_freq or model.rope_theta
    if family.lists_layer_types:
        config["layer_types"] = [model.type_of(layer) for layer in range(model.num_hidden_layers)]
    return config
