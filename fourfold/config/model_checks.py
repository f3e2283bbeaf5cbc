"""Check keys of [model] that depend on each other: the keys of latent attention, of linear attention, and of experts.
Also refuse keys that have no effect. Every function raises ``ValueError`` on a mistake."""

import math
import tomllib
from importlib.resources import files
from typing import Any

from fourfold.config.expected_values import shown
from fourfold.config.model_keys import UNSET, ModelKeys

IDLE_KEYS = tomllib.loads((files("fourfold.config") / "idle_keys.toml").read_text(encoding="utf-8"))
"""Rules about keys of [model]: if one key has a certain value, other keys have no effect, and must have their defaults.
"""


def check_effects(keys: ModelKeys) -> None:
    """Refuse a key that has no effect (see ``IDLE_KEYS``), unless the key has its default."""
    for rule in IDLE_KEYS["rules"]:
        other, value = rule["if"], rule["is"]
        for key in rule["idle"] if getattr(keys, other) == value else ():
            if getattr(keys, key) != _default(key):
                raise ValueError(
                    f"{key} = {shown(getattr(keys, key))} has no effect with model.{other} = {shown(value)}; leave "
                    f"{key} out"
                )


def _default(key: str) -> Any:
    return ModelKeys.model_fields[key].default


def check_latents(keys: ModelKeys) -> None:
    """Check the sizes of latent attention. Keys that latent attention does not support must have their defaults."""
    for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if getattr(keys, key) == 0:
            raise ValueError(f"kv_lora_rank = {keys.kv_lora_rank} needs {key}; {key} = 64 works")
    if keys.qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim = {keys.qk_rope_head_dim} is odd, but must be even; 64 works")
    width = keys.qk_nope_head_dim + keys.qk_rope_head_dim
    if keys.v_head_dim > width:
        raise ValueError(
            f"v_head_dim = {keys.v_head_dim} is above qk_nope_head_dim + qk_rope_head_dim = {width}; {width} works"
        )
    only = {"head_dim": width, "num_key_value_heads": keys.num_attention_heads, "position_embedding": "rope"}
    for key, value in ({key: _default(key) for key in IDLE_KEYS["not_with_latents"]} | only).items():
        if getattr(keys, key) not in (UNSET, value):
            raise ValueError(
                f"{key} = {shown(getattr(keys, key))} does not work with kv_lora_rank = {keys.kv_lora_rank}; "
                f"{key} = {shown(value)} works"
            )


def check_linear_attention(keys: ModelKeys) -> None:
    """Check the sizes of linear attention. Without a linear_attention layer, the sizes must be unset."""
    is_used = "linear_attention" in keys.layer_types
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    for key in (f"linear_{size}" for size in sizes):
        value = getattr(keys, key)
        if is_used and value == 0:
            raise ValueError(f"layer_types = {keys.layer_types} needs {key}; {key} = 16 works")
        if value and not is_used:
            raise ValueError(f"{key} = {value} has no effect without a linear_attention layer; leave {key} out")
    if is_used and keys.linear_num_value_heads % keys.linear_num_key_heads:
        raise ValueError(
            f"linear_num_key_heads = {keys.linear_num_key_heads} does not divide linear_num_value_heads = "
            f"{keys.linear_num_value_heads}; linear_num_key_heads = "
            f"{math.gcd(keys.linear_num_key_heads, keys.linear_num_value_heads)} works"
        )


def check_experts(keys: ModelKeys) -> None:
    """Check the number of experts, the router's keys, and the keys of the shared expert."""
    if not keys.num_experts:
        return
    if keys.num_experts_per_tok > keys.num_experts:
        raise ValueError(
            f"num_experts_per_tok = {keys.num_experts_per_tok} is more than num_experts = {keys.num_experts}; "
            f"num_experts_per_tok = {keys.num_experts} works"
        )
    if not keys.mlp.endswith("glu"):
        raise ValueError(
            f"num_experts = {keys.num_experts} needs gated MLPs, and mlp = '{keys.mlp}'; mlp = 'swiglu' works"
        )
    if keys.first_k_dense_replace >= keys.num_hidden_layers:
        raise ValueError(
            f"first_k_dense_replace = {keys.first_k_dense_replace} leaves no layer with experts, because "
            f"num_hidden_layers = {keys.num_hidden_layers}; first_k_dense_replace = 0 works"
        )
    few = 2 if keys.router_score == "sigmoid" and keys.n_group > 1 else 1
    if keys.num_experts % (few * keys.n_group):
        raise ValueError(
            f"n_group = {keys.n_group} must split num_experts = {keys.num_experts} into groups of at least {few}; 1 "
            "works"
        )
    fewest = math.ceil(keys.num_experts_per_tok * keys.n_group / keys.num_experts)
    if not fewest <= keys.topk_group <= keys.n_group:
        raise ValueError(
            f"topk_group = {keys.topk_group} must be {fewest} to n_group = {keys.n_group} for num_experts_per_tok "
            f"= {keys.num_experts_per_tok} of num_experts = {keys.num_experts}; topk_group = {keys.n_group} works"
        )
    if keys.shared_expert_gate and not keys.shared_expert_intermediate_size:
        raise ValueError(
            "shared_expert_gate = true needs a shared expert, but shared_expert_intermediate_size = 0 means that "
            f"there is none; shared_expert_intermediate_size = {keys.moe_intermediate_size} works"
        )
