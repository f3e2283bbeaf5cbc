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
    slides = {name: found[kind].slides for name, kind in _SLIDES.items()} | _OWN_SLIDES
    plain = {**found["gpt2"].activations, "relu2": {"mlp": "relu2"}}
    text = (files("fourfold.huggingface.architectures") / "variants.toml").read_text(encoding="utf-8")
    for kind, entries in _with_none(tomllib.loads(text)).items():
        tables = [entries.pop(name, {}) for name in ("keys", "defaults", "fixed")]
        base, architecture = found[entries.pop("variant_of")], entries.pop("architecture")
        if "slides" in entries:
            entries["slides"] = slides[entries["slides"]]
        if first := entries.pop("activation", None):
            entries["activations"] = {first: plain[first], **plain}
        found[kind] = base.variant(architecture, *tables, **entries)
    return found


_SLIDES = {"never": "llama", "all_but_patterns_last": "gemma3_text", "from_the_nth_on": "qwen2"}
"""Maps names in variants.toml to architectures. A variant with such a name uses the ``slides`` of the architecture."""


_OWN_SLIDES: dict[str, Callable[[int, Mapping[str, Any]], bool]] = {
    "if_listed": lambda layer, given: False,
    "all_but_every_fourth": lambda layer, given: layer % 4 > 0,
    "as_in_flint": lambda layer, given: layer > 1 and layer % 4 != 1 and layer < given["num_hidden_layers"] - 1,
}


def _with_none(value: Any) -> Any:
    """Replace each string "null" in a TOML value with None."""
    if isinstance(value, dict):
        return {key: _with_none(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_none(each) for each in value]
    return None if value == "null" else value
