"""Read the rotary embeddings of a Hugging Face config.json."""

from collections.abc import Mapping
from typing import Any

from fourfold.errors import UserError
from fourfold.huggingface.architectures.family import ROPE_KEYS, Family

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
OF_SLIDING = {"rope_type", "rope_theta"}
"""Keys that can be in config.json's table of rotary embeddings for sliding-window layers."""
OF_IMAGES = {"mrope_section", "mrope_interleaved"}
"""Keys that divide the rotary channels among the axes of an image. They have no effect on text, whose tokens have the
same position on each axis."""


def rope_keys(given: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Return the keys of [model] for rotary embeddings, from the keys of transformers 4 (rope_scaling, …) or of
    transformers 5 (rope_parameters).

    A file can have both. transformers prefers rope_scaling, which model cards recommend adding for long texts.

    Args:
        given: The config.json, with the family's defaults for missing keys.
        family: The family.
        where: The beginning of error messages, which names the file.

    Raises:
        UserError: The decoder cannot compute these rotary embeddings.
    """
    tables = {key: given.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    if not family.rope_theta and tables["rope_scaling"]:
        raise UserError(f"{where}: rope_scaling is not supported; rope_parameters with a table per layer type works")
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            raise UserError(f"{where}: {key} = {table!r} is not a table of the rotary embeddings' type and factors")
    local: dict[str, Any] = {}
    name = "rope_scaling" if tables["rope_scaling"] else "rope_parameters"
    if family.rope_local_theta is None:
        rope = dict(tables[name])
        if rope.keys() & {FULL, SLIDING}:
            raise UserError(f"{where}: {name} has a table per kind of layer; the layers of this family share one table")
    else:
        local, rope = _local_rope(given, family, tables["rope_parameters"], tables["rope_scaling"], where)
    theta = _first(rope.pop("rope_theta", None), given.get(family.rope_theta), 10000.0)
    part = given.get(family.partial_rotary_factor or "partial_rotary_factor")
    part = _first(rope.pop("partial_rotary_factor", None), part, 1.0)
    check_number(f"{where}: rope_theta", theta)
    check_number(f"{where}: partial_rotary_factor", part)
    if part != 1.0 and family.partial_rotary_factor is None:
        raise UserError(f"{where}: partial_rotary_factor = {part}; models of this family rotate whole heads")
    always = {"rope_theta": float(theta), "partial_rotary_factor": float(part), **local}
    older = rope.pop("type", None)
    kind = rope.pop("rope_type", older) or "default"
    if kind == "default":
        return always | {"rope_scaling": None}
    if kind not in family.rope_types:
        known = ", ".join(("default", *family.rope_types))
        raise UserError(
            f"{where}: rope_type '{kind}' of model_type '{given['model_type']}' is not supported; supported are {known}"
        )
    return always | {"rope_scaling": {"rope_type": kind, **_scaling(rope, kind, given, family, f"{where}: {name}")}}


def _scaling(rope: dict[str, Any], kind: str, given: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Return the factors of a type of rotary scaling, from the table ``rope`` of config.json."""
    # transformers reads truncate = null as false, and a missing truncate as true.
    if "truncate" in rope and rope["truncate"] is None:
        rope["truncate"] = False
    rope = {key: value for key, value in rope.items() if value is not None and (key != "truncate" or kind == "yarn")}
    if "factor" not in rope:
        raise UserError(f"{where} has no factor, but rope_type '{kind}' needs one; 2.0 doubles the context")
    # Some files with linear scaling also have original_max_position_embeddings. The key has no effect there, so allow
    # it.
    for key in sorted(rope.keys() - {*ROPE_KEYS[kind], "original_max_position_embeddings"} - OF_IMAGES):
        raise UserError(f"{where}: '{key}' of rotary embeddings of type '{kind}' is not supported")
    if kind != "linear":
        beyond = given.get("original_max_position_embeddings") if family.rope_local_theta is None else None
        inside = rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = _first(beyond, inside, given["max_position_embeddings"])
    scaling = {key: rope[key] for key in ROPE_KEYS[kind] if key in rope}
    for key, value in scaling.items():
        if key == "truncate" and not isinstance(value, bool):
            raise UserError(f"{where}.truncate = {value!r} is neither true nor false")
        if key != "truncate":
            check_number(f"{where}.{key}", value, positive=True)
            scaling[key] = value if key == "original_max_position_embeddings" else float(value)
    return scaling


def _local_rope(
    given: Mapping[str, Any], family: Family, tables: Mapping[str, Any], scaling: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the key of [model] for the rotary base of sliding-window layers, and then config.json's rotary settings
    for full-attention layers. rope_scaling applies only to full-attention layers."""
    # In these families, rope_parameters has one table per type of layer. transformers would silently ignore a table
    # without a type.
    if tables and not tables.keys() & {FULL, SLIDING}:
        raise UserError(f"{where}: rope_parameters has no table of '{FULL}' or '{SLIDING}'")
    own, full = tables.get(SLIDING) or {}, tables.get(FULL) or {"rope_type": "default"}
    if not isinstance(own, Mapping) or own.get("rope_type", "default") != "default" or own.keys() - OF_SLIDING:
        raise UserError(
            f"{where}: the rotary embeddings of sliding layers are {own!r}; only rope_type = 'default' is supported"
        )
    if not isinstance(full, Mapping):
        raise UserError(f"{where}: the rotary embeddings of full layers are {full!r}, not a table")
    base = given.get("rope_local_base_freq") if family.reads_local_theta else None
    if not family.reads_local_theta and "rope_theta" in full:
        base = given.get("rope_theta")
    base = _first(own.get("rope_theta"), base, family.rope_local_theta)
    check_number(f"{where}: the rope_theta of sliding layers", base)
    if base <= 1:
        raise UserError(f"{where}: the rope_theta of sliding layers, {base}, is not above 1")
    return {"rope_local_base_freq": float(base)}, {**full, **scaling}


def check_number(key: str, value: Any, positive: bool = False) -> None:
    """Raise ``UserError`` if the value of a key is not a number. If ``positive`` is true, also refuse numbers ≤ 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or (positive and not value > 0):
        raise UserError(f"{key} = {value!r} is not a {'positive ' * positive}number")


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)
