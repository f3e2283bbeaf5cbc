"""Read the architectures that differ from another architecture only in a few keys, defaults, or fixed values."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from fourfold.huggingface.architectures.family import Family


def with_variants(families: Mapping[str, Family]) -> dict[str, Family]:
    """Return ``families`` and the architectures of ``variants.toml``."""
    found = dict(families)
    plain = {**found["gpt2"].activations, "relu2": {"mlp": "relu2"}}
    text = (files("fourfold.huggingface.architectures") / "variants.toml").read_text(encoding="utf-8")
    for kind, entries in _with_none(tomllib.loads(text)).items():
        tables = [entries.pop(name, {}) for name in ("keys", "defaults", "fixed")]
        base, architecture = found[entries.pop("variant_of")], entries.pop("architecture")
        if "slides" in entries:
            entries["slides"] = _SLIDES[entries["slides"]]
        if first := entries.pop("activation", None):
            entries["activations"] = {first: plain[first], **plain}
        found[kind] = base.variant(architecture, *tables, **entries)
    return found


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
"""Maps names in variants.toml to values of ``Family.slides``."""


def _with_none(value: Any) -> Any:
    """Replace each string "null" in a TOML value with None."""
    if isinstance(value, dict):
        return {key: _with_none(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_none(each) for each in value]
    return None if value == "null" else value
