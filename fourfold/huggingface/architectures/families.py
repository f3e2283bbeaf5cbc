"""Load the transformers architectures that the decoder can compute. ``families.toml`` describes them, most of them by
their differences from another architecture."""

import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from fourfold.huggingface.architectures.family import Family

_SLIDES: dict[str, Callable[[int, Mapping[str, Any]], bool] | None] = {
    "never": None,
    "if_listed": lambda layer, given: False,
    "every": lambda layer, given: True,
    "from_the_nth_on": lambda layer, given: bool(layer >= given["max_window_layers"]),
    "every_second_up_to_the_nth": lambda layer, given: layer % 2 == 0 and layer < given["max_window_layers"],
    "all_but_last_of_two": lambda layer, given: layer % 2 == 0,
    "all_but_first_of_four": lambda layer, given: layer % 4 > 0,
    "all_but_last_of_four": lambda layer, given: layer % 4 < 3,
    "all_but_patterns_last": lambda layer, given: bool((layer + 1) % given["sliding_window_pattern"]),
    "as_in_flint": lambda layer, given: layer > 1 and layer % 4 != 1 and layer < given["num_hidden_layers"] - 1,
}
"""Maps the names of patterns in families.toml to functions that say whether a layer has a sliding window
(``Family.slides``)."""


def _families() -> dict[str, Family]:
    """Return the architectures of ``families.toml``, by model_type."""
    found: dict[str, Family] = {}
    text = (files("fourfold.huggingface.architectures") / "families.toml").read_text(encoding="utf-8")
    for kind, entries in _with_none(tomllib.loads(text)).items():
        if "slides" in entries:
            entries["slides"] = _SLIDES[entries["slides"]]
        if "variant_of" not in entries:
            found[kind] = Family(**entries)
            continue
        if first := entries.pop("activation", None):
            plain = {**found["gpt2"].activations, "relu2": {"mlp": "relu2"}}
            entries["activations"] = {first: plain[first], **plain}
        tables = [entries.pop(name, {}) for name in ("keys", "defaults", "fixed")]
        found[kind] = found[entries.pop("variant_of")].variant(entries.pop("architecture"), *tables, **entries)
    return found


def _with_none(value: Any) -> Any:
    """Replace each string "null" in a TOML value with None."""
    if isinstance(value, dict):
        return {key: _with_none(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_none(each) for each in value]
    return None if value == "null" else value


FAMILIES = _families()

MISSING: dict[str, str] = {
    "phi": "parallel attention and MLP with one shared norm, and a bias in the head",
    "gemma3": "images (only its text model, 'gemma3_text', is supported)",
    "phimoe": "sparsemixer, its method to choose experts",
    "llama4": "experts with scaled inputs, and chunked attention",
}
"""Maps refused architectures to the features that the decoder lacks for them."""
