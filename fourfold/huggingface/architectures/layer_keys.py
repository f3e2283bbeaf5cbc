"""Read which layers of a Hugging Face config.json have experts, sliding windows, or rotary embeddings."""

from collections.abc import Mapping
from typing import Any

from fourfold.config.expected_values import shown
from fourfold.errors import UserError
from fourfold.huggingface.architectures.family import Family
from fourfold.huggingface.architectures.rope_keys import FULL, LINEAR, SLIDING

MOST_LAYERS = 10_000
"""Largest number of layers whose types are listed one by one. No model has more layers."""


def rotating_layers(given: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Return the key no_rope_layers of [model] if config.json says which layers have rotary embeddings. The key's value
    is a list with 1 for each of these layers, and 0 for each layer without rotary embeddings. If config.json lists a
    rotary base for each layer, also return rope_theta.

    Args:
        given: The config.json, with the family's defaults for missing keys.
        family: The family.
        where: The beginning of error messages, which names the file.

    Raises:
        UserError: The key that says which layers have rotary embeddings has an invalid value.
    """
    if family.rotating_layers == "with_theta" and given["layer_rope_theta"] is not None:
        return _thetas_of_layers(given, family, where)
    if family.rotating_layers != "listed":
        return {}
    count, listed = count_layers(given, family, where), given["no_rope_layers"]
    if listed is None:
        interval = given["no_rope_layer_interval"]
        check_count("no_rope_layer_interval", interval, 1, where)
        return {"no_rope_layers": [int((layer + 1) % interval > 0) for layer in range(count)]}
    if not isinstance(listed, list) or len(listed) < count or any(each not in (0, 1) for each in listed):
        raise UserError(f"{where}: no_rope_layers = {listed!r} is not a list of 0 or 1 for each of {count} layers")
    return {"no_rope_layers": [int(each) for each in listed[:count]]}


def types_of_gpt_neo(given: Mapping[str, Any], where: str) -> list[str]:
    """Return the attention types of the layers of a GPT-Neo model. Its config.json lists groups of types, and how often
    each group repeats."""
    kinds = {"global": FULL, "local": SLIDING}
    try:
        names = [name for listed, count in given["attention_types"] for name in count * list(listed)]
        found = [kinds[name] for name in names]
    except (TypeError, ValueError, KeyError):
        shown_types = shown(given["attention_types"])
        raise UserError(f"{where}: attention_types = {shown_types}; [[['global', 'local'], 6]] works") from None
    if given.get("attention_layers", names) != names:
        raise UserError(
            f"{where}: attention_layers = {given['attention_layers']} differs from attention_types; remove "
            "attention_layers"
        )
    return found


def linear_layers(given: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Return the attention type of each layer, for a family with linear attention. If no layer is linear, also return 0
    for the sizes of linear attention.

    Args:
        given: The config.json, with the family's defaults for missing keys.
        family: The family.
        where: The beginning of error messages, which names the file.

    Raises:
        UserError: The layer types are not a list with one entry per layer, or a layer has neither linear nor full
            attention.
    """
    kinds, interval = given["layer_types"], given["full_attention_interval"]
    if kinds is None:
        check_count("full_attention_interval", interval, 1, where)
        count = count_layers(given, family, where)
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    check_layer_types(kinds, (FULL, LINEAR), given, family, where)
    sizes = [key for key in family.keys if key.startswith("linear_") and not key.startswith("linear_conv")]
    return {"layer_types": kinds, **({} if LINEAR in kinds else dict.fromkeys(sizes, 0))}


def check_layer_types(kinds: Any, known: tuple[str, ...], given: Mapping[str, Any], family: Family, where: str) -> None:
    """Raise ``UserError`` if a list of layer types has an unknown type, or does not have one entry per layer."""
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        names = " and ".join(f"'{kind}'" for kind in known)
        raise UserError(f"{where}: layer_types = {kinds!r}; fourfold supports {names} layers")
    count = count_layers(given, family, where)
    if len(kinds) != count:
        raise UserError(
            f"{where}: layer_types has {len(kinds)} entries, but {family.keys['num_hidden_layers']} = {count}; give "
            "one entry for each layer"
        )


def _thetas_of_layers(given: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Return the keys of [model] for a config.json that lists a rotary base for each layer: rope_theta, the base that
    all layers with rotary embeddings share, and no_rope_layers."""
    listed, count = given["layer_rope_theta"], count_layers(given, family, where)
    thetas = listed[:count] if isinstance(listed, list) else []
    bases = {theta for theta in thetas if isinstance(theta, int | float) and theta != 0}
    if len(thetas) < count or len(bases) > 1 or any(theta != 0 and theta not in bases for theta in thetas):
        raise UserError(f"{where}: layer_rope_theta = {listed!r}; give {count} numbers, each 0 or the common base")
    base = {"rope_theta": float(bases.pop())} if bases else {}
    return base | {"no_rope_layers": [int(theta != 0) for theta in thetas]}


def count_layers(given: Mapping[str, Any], family: Family, where: str) -> int:
    """Return the number of layers. Refuse a number that is too large to list the layers one by one."""
    name = family.keys["num_hidden_layers"]
    count: int = given[name]
    check_count(name, count, 1, where)
    if count > MOST_LAYERS:
        raise UserError(f"{where}: {name} = {count}; if layers differ, fourfold supports at most {MOST_LAYERS}")
    return count


def expert_keys(given: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Return the keys of [model] that say which layers have no experts, and how wide the shared expert is."""
    keys = {}
    if family.dense_layers is not None and given.get(family.dense_layers) is not None:
        keys["first_k_dense_replace"] = _first_dense_layers(given, family, family.dense_layers, where)
    if family.shared_experts is not None:
        count, width = family.shared_experts, family.keys["moe_intermediate_size"]
        for key in (count, width):
            check_count(key, given.get(key), 1, where)
        keys["shared_expert_intermediate_size"] = given[count] * given[width]
    return keys


def _first_dense_layers(given: Mapping[str, Any], family: Family, name: str, where: str) -> int:
    """Return the number of layers with a dense MLP. Raise ``UserError`` if other layers come before these layers."""
    layers = listed = given[name]
    if name == "mlp_layer_types" and isinstance(listed, list):
        layers = [layer for layer, kind in enumerate(listed) if kind != "sparse"]
    if not isinstance(layers, list) or layers != list(range(len(layers))):
        raise UserError(f"{where}: {name} = {listed}; fourfold supports dense MLPs only in the first layers")
    count = count_layers(given, family, where)
    if len(layers) >= count:
        raise UserError(
            f"{where}: {name} = {listed} with num_hidden_layers = {count}; an MoE model needs a layer with experts"
        )
    return len(layers)


def check_count(name: str, value: Any, least: int, where: str) -> None:
    """Raise ``UserError`` if the value of a key is not an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{where}: {name} = {value!r} is not an integer of at least {least}")
