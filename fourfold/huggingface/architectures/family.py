"""Define the record of a transformers architecture: the keys, defaults, and requirements of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Table = Mapping[str, Any]

LAYER_NUMBERS = {"sliding_window_pattern": 1, "max_window_layers": 0}
"""Keys of config.json that determine which layers have a sliding window, with their smallest allowed value."""

_YARN_FACTORS = ("attention_factor", "mscale", "mscale_all_dim")
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", *_YARN_FACTORS),
}
"""The keys that determine the rotary frequencies, by type of scaling."""

TOPK_METHOD = "topk_method"
"""Key of config.json that says whether experts are chosen by groups. The first of its allowed values means "without
groups"."""

REQUIRED: dict[str, tuple[Any, ...]] = {"is_causal": (True,), "per_layer_config": (None, {})}
"""Keys that must have one of these values in every family, because the decoder supports no other value."""


@dataclass(frozen=True)
class Family:
    """One architecture of transformers: how its config.json maps to [model] (a table of the run file)."""

    architecture: str
    """Name of the class in transformers."""
    keys: Mapping[str, str]
    """Maps keys of [model] to the names of these keys in config.json. A config.json may lack some keys."""
    defaults: Mapping[str, Any]
    """The family's default values for keys that a config.json lacks."""
    fixed: Mapping[str, Any]
    """Keys of [model] that have the same value in every model of the family."""
    activations: Mapping[str, Mapping[str, Any]]
    """For each value of the family's ``activation_key``, the keys of [model] that it sets. The first value is the
    default."""
    activation_key: str = "hidden_act"
    """Name of the key of config.json that selects the MLP's activation."""
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of config.json that must have one of these values, because the decoder supports no other value."""
    rope_theta: str = "rope_theta"
    """Name of the key for the rotary base in files of transformers 4. Empty if transformers reads only rope_parameters.
    """
    partial_rotary_factor: str | None = None
    """Name of the key for the rotated fraction of a head in files of transformers 4. None if rotary embeddings always
    rotate whole heads."""
    rope_types: tuple[str, ...] = tuple(ROPE_KEYS)
    """The types of rotary scaling that the family supports."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Maps alternative names of keys, which transformers also reads or writes, to the usual names. If a file has both
    names, the value under the alternative name counts."""
    dense_layers: Literal["mlp_only_layers", "mlp_layer_types"] | None = None
    """Name of the key that lists the layers without experts, or the kinds of all layers ("dense" and "sparse"). The
    decoder requires that the layers without experts come first. None if the family has no such key."""
    shared_experts: str | None = None
    """Name of the key that gives the shared expert's width as a multiple of an expert's width. None if the family has
    no such key."""
    slides: Callable[[int, Mapping[str, Any]], bool] | None = None
    """Function that returns whether a layer uses the config's sliding_window. None if the family has no sliding
    window."""
    lists_layer_types: bool = False
    """Whether layer_types in config.json, if given, says which layers have a sliding window, instead of ``slides``."""
    has_linear_layers: bool = False
    """Whether layers have linear or full attention, as layer_types lists them. By default, every n-th layer has full
    attention, with n = full_attention_interval."""
    rope_local_theta: float | None = None
    """Default rotary base of sliding-window layers. None if they use the same base as all other layers."""
    reads_local_theta: bool = False
    """Whether the key rope_local_base_freq sets the rotary base of sliding-window layers."""
    rotating_layers: Literal["all", "sliding", "only_sliding", "listed", "with_theta"] = "all"
    """Which layers have rotary embeddings:

    - "all": all layers
    - "sliding": only sliding-window layers, or all layers if there is no window
    - "only_sliding": only sliding-window layers
    - "listed": the layers that no_rope_layers lists
    - "with_theta": the layers for which layer_rope_theta is not 0
    """
    reciprocals: tuple[str, ...] = ()
    """Keys of [model] whose reciprocals are in config.json."""
    published_as: str | None = None
    """Another name of the class in published files. Such files came with their own code before transformers had the
    class."""
    quantization: Mapping[str, Any] = field(default_factory=dict)
    """Keys and values that quantization_config must have, so that fourfold can read the quantized weights."""

    def variant(self, architecture: str, keys: Table, defaults: Table, fixed: Table, **changes: Any) -> Family:
        """Return a copy of this architecture with some changes.

        Args:
            architecture: Name of the copy's class in transformers.
            keys: Entries to add to ``keys``. The value None removes the entry, so the key is not read.
            defaults: Entries to add to ``defaults``.
            fixed: Entries to add to ``fixed``.
            changes: Other fields to replace.
        """
        read = {ours: theirs for ours, theirs in {**self.keys, **keys}.items() if theirs is not None}
        defaults, fixed = {**self.defaults, **defaults}, {**self.fixed, **fixed}
        return replace(self, architecture=architecture, keys=read, defaults=defaults, fixed=fixed, **changes)
