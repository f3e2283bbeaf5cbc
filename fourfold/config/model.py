"""The section [model] of the run file. It describes a decoder. The keys have the same names as in Hugging Face."""

import math
from typing import Any, Self

from pydantic import field_validator, model_validator

from fourfold.config.expected_values import round_to_multiple
from fourfold.config.layer_pattern import pattern_of
from fourfold.config.model_checks import check_effects, check_experts, check_latents, check_linear_attention
from fourfold.config.model_keys import UNSET, LayerType, ModelKeys
from fourfold.config.rope_scaling import no_pairs

IGNORE_INDEX = -100
"""Label of a position that the loss ignores. The data pipeline writes it, and the model's loss reads it."""

DERIVED = {"num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "query_pre_attn_scalar"}
"""Keys whose values ``ModelConfig`` derives from other keys if they are unset or null."""


class ModelConfig(ModelKeys):
    """The model, a decoder. These keys describe models of the families GPT-2/3, GPT-NeoX, GPT-OSS, Llama, Mistral,
    Qwen, OLMo, Gemma, Granite, DeepSeek, and [more families](huggingface-models.md)."""

    @model_validator(mode="before")
    @classmethod
    def _none_is_unset(cls, table: Any) -> Any:
        """Treat null as unset for keys that are derived from other keys. Hugging Face's config.json often has null
        there."""
        if not isinstance(table, dict):
            return table
        return {key: value for key, value in table.items() if value is not None or key not in DERIVED}

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _default_is_none(cls, value: Any) -> Any:
        """Treat rope_type = 'default' as no scaling, as Hugging Face does. A run file can remove a preset's scaling
        this way."""
        return None if isinstance(value, dict) and value.get("rope_type") == "default" else value

    @model_validator(mode="after")
    def _fill_and_check(self) -> Self:
        if self.num_key_value_heads == UNSET:
            self.num_key_value_heads = self.num_attention_heads
        if self.kv_lora_rank and self.head_dim == UNSET:
            self.head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.head_dim == UNSET:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                    f"{self.num_attention_heads}, and head_dim is not set; hidden_size = "
                    f"{round_to_multiple(self.hidden_size, self.num_attention_heads)} works"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.query_pre_attn_scalar == UNSET:
            self.query_pre_attn_scalar = self.head_dim
        if self.attention_multiplier == UNSET:
            self.attention_multiplier = self.query_pre_attn_scalar**-0.5
            if self.kv_lora_rank and self.rope_scaling is not None and self.rope_scaling.mscale_all_dim:
                self.attention_multiplier *= self.rope_scaling.yarn_scale(self.rope_scaling.mscale_all_dim) ** 2
        if self.intermediate_size == UNSET:
            self.intermediate_size = 4 * self.hidden_size
        if self.num_experts and self.moe_intermediate_size == UNSET:
            self.moe_intermediate_size = self.intermediate_size
        if 0 < self.rope_local_base_freq <= 1:
            raise ValueError(f"rope_local_base_freq = {self.rope_local_base_freq} must be 0 or above 1; 10000.0 works")
        self._fill_layer_types()
        check_linear_attention(self)
        check_experts(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads = {self.num_key_value_heads} does not divide model.num_attention_heads = "
                f"{self.num_attention_heads}; num_key_value_heads = "
                f"{math.gcd(self.num_key_value_heads, self.num_attention_heads)} works"
            )
        if self.kv_lora_rank:
            check_latents(self)
        if self.position_embedding == "rope" and (self.rotary_dim % 2 or self.rotary_dim == 0):
            is_derived = self.head_dim * self.num_attention_heads == self.hidden_size
            raise ValueError(no_pairs(self.head_dim, is_derived, self.partial_rotary_factor, self.rotary_dim))
        check_effects(self)
        return self

    def _fill_layer_types(self) -> None:
        """Normalize the settings that can differ between layers, so that equal models have equal settings.

        Shorten lists with one entry per layer to the pattern that repeats. If a setting has no effect, reset the
        setting to its default.
        """
        self.no_rope_layers = pattern_of(self.no_rope_layers or [1], self.num_hidden_layers)
        if self.no_rope_layers == [1]:
            self.no_rope_layers = []
        if self.rope_local_base_freq == self.rope_theta and self.rope_scaling is None:
            self.rope_local_base_freq = 0.0
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError(
                f"layer_types = {self.layer_types} needs model.sliding_window, which is 0; layer_types = [] works"
            )
        by_default: LayerType = "sliding_attention" if self.sliding_window else "full_attention"
        self.layer_types = pattern_of(self.layer_types or [by_default], self.num_hidden_layers)
        if self.layer_types == ["full_attention"]:
            self.layer_types = []
        if self.sliding_window and not self.sliding_layers:
            self.sliding_window, self.rope_local_base_freq = 0, 0.0

    def type_of(self, layer: int) -> LayerType:
        """Return the attention type of a layer."""
        return self.layer_types[layer % len(self.layer_types)] if self.layer_types else "full_attention"

    def rotates(self, layer: int) -> bool:
        """Return whether a layer has rotary embeddings."""
        is_left_out = self.no_rope_layers and not self.no_rope_layers[layer % len(self.no_rope_layers)]
        return self.position_embedding == "rope" and not is_left_out

    @property
    def kinds_of_layers(self) -> list[LayerType]:
        """Return the attention types that the layers use, each once."""
        return list(dict.fromkeys(self.layer_types)) or ["full_attention"]

    @property
    def sliding_layers(self) -> int:
        """Return the number of layers with a sliding window."""
        return self._count("sliding_attention")

    @property
    def linear_layers(self) -> int:
        """Return the number of layers with linear attention."""
        return self._count("linear_attention")

    def _count(self, kind: LayerType) -> int:
        return sum(self.type_of(layer) == kind for layer in range(self.num_hidden_layers))

    @property
    def gated_mlp(self) -> bool:
        """Return whether the MLP has a gate in addition to its up projection."""
        return self.mlp.endswith("glu")

    @property
    def rotary_dim(self) -> int:
        """Return the number of channels that rotary embeddings rotate in each head."""
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def padded_vocab_size(self) -> int:
        """Return the number of rows of the embedding and head weights.

        This number does not depend on the grid, so you can resume a checkpoint on another grid.
        """
        multiple = self.pad_vocab_size_to_multiple_of
        return math.ceil(self.vocab_size / multiple) * multiple

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.num_experts > 0 and layer >= self.first_k_dense_replace

    @property
    def sparse_layers(self) -> int:
        """Return the number of layers that have experts."""
        return self.num_hidden_layers - self.first_k_dense_replace if self.num_experts else 0
