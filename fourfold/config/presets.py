"""Presets: well-known models with their published sizes, such as 'gpt2'."""

import difflib
import tomllib
from importlib.resources import files
from typing import Any

from fourfold.config.expected_values import shown
from fourfold.errors import UserError


def _read() -> dict[str, dict[str, Any]]:
    table = tomllib.loads((files("fourfold.config") / "presets.toml").read_text(encoding="utf-8"))
    return {name: table["families"].get(keys.pop("family", None), {}) | keys for name, keys in table["models"].items()}


PRESETS = _read()
"""Maps the name of each preset to its keys of [model] and their values."""


def with_preset(section: dict[str, Any], given_as: str = "model.preset =") -> dict[str, Any]:
    """Return a ``[model]`` table with the sizes of the preset that it names. Keys of the table override the preset. A
    table without a preset is returned unchanged.

    Args:
        section: The ``[model]`` table.
        given_as: The key or command-line option that named the preset. The error message begins with it.

    Raises:
        UserError: The preset is unknown.
    """
    name = section.get("preset")
    if name is None:
        return section
    if not isinstance(name, str) or name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(PRESETS)}"
        raise UserError(f"{given_as} {shown(name)} is not a preset; {hint}")
    return filled(section, PRESETS[name])


def filled(section: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a ``[model]`` table with its missing keys filled from ``defaults``.

    If both tables have a ``rope_scaling`` of the same type, the missing keys of ``rope_scaling`` are filled too.
    """
    both = {**defaults, **section}
    base, own = defaults.get("rope_scaling"), section.get("rope_scaling")
    if isinstance(base, dict) and isinstance(own, dict) and own.get("rope_type") in (None, base["rope_type"]):
        both["rope_scaling"] = {**base, **own}
    return both
