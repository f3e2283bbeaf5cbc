"""Convert a Hugging Face config.json to the keys of ``[model]``, a table of the run file. Refuse models that the
decoder cannot compute.

Keys that transformers ignores are ignored here too. A missing key gets transformers' default.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fourfold.config.expected_values import mistake, shown
from fourfold.config.model import ModelConfig
from fourfold.config.presets import filled
from fourfold.errors import UserError, first_line
from fourfold.extras import import_extra
from fourfold.huggingface.architectures.families import FAMILIES, MISSING
from fourfold.huggingface.architectures.family import LAYER_NUMBERS, REQUIRED, TOPK_METHOD, Family
from fourfold.huggingface.architectures.layer_keys import (
    check_count,
    check_layer_types,
    count_layers,
    expert_keys,
    linear_layers,
    rotating_layers,
    types_of_gpt_neo,
)
from fourfold.huggingface.architectures.rope_keys import FULL, SLIDING, check_number, rope_keys
from fourfold.parsing import parse_json
from fourfold.untrusted_files import check_model_folder, check_no_adapter, check_regular

CONFIG_FILE = "config.json"
QUANTIZED = "quantization_config"
WITH_IMAGES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Maps the model_type of models for images and text to the model_type of their text models. Only the text model is
imported."""

NEVER_NULL = (
    "swiglu_limit", "num_experts_per_tok", "norm_topk_prob", "first_k_dense_replace", "n_group", "topk_group",
    "routed_scaling_factor", "kv_lora_rank", "linear_conv_kernel_dim",
)  # fmt: skip
"""Keys that must not be null, unless null is the family's default. transformers refuses null for these keys, or reads
it as false."""

NONE_IS_0 = ("attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank")
"""Keys of features that can be switched off. The value null switches a feature off in config.json, and 0 in [model]."""

NEVER_0 = dict.fromkeys(NONE_IS_0[:2], "divides by zero; null means no cap") | {
    "q_lora_rank": "is not a width; null computes queries without latents",
    "kv_lora_rank": "is not a width; 512 works",
    "shared_expert_intermediate_size": "is not a width; 512 works",
    "swiglu_limit": "clamps every gate; 7.0 works",
    "attention_multiplier": "gives all keys the same score; 0.125 works",
}
"""Keys of config.json that must not be 0, with the reason. In [model], 0 has another meaning."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a config.json. ``path`` is the file or its folder. If the model also takes images, return
    only the text model's part. Raise ``UserError`` if there is no such file or it is invalid."""
    file = path if path.suffix == ".json" and not path.is_dir() else path / CONFIG_FILE
    if file is not path and path.is_dir():
        check_model_folder(path)
        if not file.exists():
            check_no_adapter(path)
    try:
        config = parse_json(check_regular(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read {file}: {error.strerror}; the folder of a Hugging Face model contains this file"
        ) from None
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} is not the configuration of a model")
    text = config.get("text_config")
    if config.get("model_type") not in list(WITH_IMAGES) or not isinstance(text, dict):
        return config
    quantized = {key: value for key, value in config.items() if key == QUANTIZED}
    return {**quantized, "architectures": [FAMILIES[WITH_IMAGES[config["model_type"]]].architecture], **text}


def family_of(config: Mapping[str, Any], where: str) -> str:
    """Return the ``model_type`` of a config.json.

    Raise ``UserError`` if the decoder cannot compute this architecture. The message names what is missing.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"{where}: model_type = {kind!r} is not the name of an architecture")
    if kind in MISSING:
        raise UserError(f"{where}: model_type '{kind}' needs {MISSING[kind]}, which fourfold does not support")
    if kind not in FAMILIES:
        raise UserError(f"{where}: model_type {kind!r} is not supported; supported are {', '.join(FAMILIES)}")
    for architecture in config.get("architectures") or [FAMILIES[kind].architecture]:
        if architecture not in (FAMILIES[kind].architecture, FAMILIES[kind].published_as):
            raise UserError(
                f"{where}: the architecture is {architecture}; a language model of this family is "
                f"{FAMILIES[kind].architecture}"
            )
    return kind


def model_keys(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the table ``[model]`` that a config.json describes.

    Raise ``UserError`` if the decoder cannot compute the model.
    """
    family = FAMILIES[family_of(config, where)]
    given = _with_defaults(config, family, where)
    for key in NEVER_NULL:
        if key in config and config[key] is None and family.defaults.get(key, 0) is not None:
            raise UserError(f"{where}: {key} is null; a number works, and without the key the family's default applies")
    for key, values in {**REQUIRED, **family.required}.items():
        if given.get(key, values[0]) not in values:
            raise UserError(f"{where}: {key} = {given[key]!r}; fourfold supports only {values[0]!r}")
    _check_quantization(given.get(QUANTIZED), family, where)
    activation = given.get(family.activation_key, next(iter(family.activations)))
    if not isinstance(activation, str) or activation not in family.activations:
        raise UserError(
            f"{where}: {family.activation_key} = {activation!r}; fourfold supports only "
            f"{', '.join(map(repr, family.activations))}"
        )
    keys = {**family.fixed, **family.activations[activation]}
    for ours, theirs in family.keys.items():
        if given.get(theirs) is not None:
            keys[ours] = given[theirs]
    for ours in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        # If the default is null, ModelConfig derives the size from other sizes.
        if ours not in keys and family.defaults.get(family.keys[ours], 0) is not None:
            raise UserError(f"{where}: {family.keys[ours]} is missing")
    _check_head_dim(keys, family, given.get("head_dim"), where)
    _check_zeros(given, keys, family, where)
    # In families without a separate key for the bias of the output projection, attention_bias also controls this bias.
    if "attention_bias" in family.keys and "attention_output_bias" not in {**family.keys, **family.fixed}:
        keys["attention_output_bias"] = keys.get("attention_bias", False)
    keys |= expert_keys(given, family, where)
    if TOPK_METHOD in family.required and given[TOPK_METHOD] == family.required[TOPK_METHOD][0]:
        keys["n_group"] = keys["topk_group"] = 1
    if keys["position_embedding"] == "rope":
        keys |= rope_keys(given, family, where)
    for key in family.reciprocals:
        check_number(f"{where}: {key}", keys.setdefault(key, 1.0), positive=True)
        keys[key] = 1 / keys[key]
    keys |= _windows(given, family, where)
    keys |= rotating_layers(given, family, where)
    if family.has_linear_layers:
        keys |= linear_layers(given, family, where)
    if not keys["sliding_window"]:
        keys.pop("rope_local_base_freq", None)
    return keys


def _with_defaults(config: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Return a config.json with the family's defaults for missing keys. Keys with alternative names get the names that
    ``family.keys`` has."""
    renamed = {theirs: config[other] for other, theirs in family.other_names.items() if other in config}
    given = {**family.defaults, **config, **renamed}
    if given.get("rope_parameters") is None:
        given["rope_parameters"] = family.defaults.get("rope_parameters")
    if "attention_types" in family.defaults:
        given |= {"layer_types": types_of_gpt_neo(given, where), "sliding_window": given["window_size"]}
    if "rotary_dim" in family.defaults and given["rotary_dim"] is not None:
        for key in ("rotary_dim", "head_dim"):
            check_count(key, given[key], 1, where)
        given.setdefault("partial_rotary_factor", given["rotary_dim"] / given["head_dim"])
    return given


def model_of(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the model that a config.json describes. Raise ``UserError`` if fourfold's decoder cannot compute it."""
    try:
        return ModelConfig(**model_keys(config, where))
    except ValidationError as error:
        raise UserError(f"{where}: {mistake(error.errors()[0], ModelConfig)}") from None


def _check_zeros(given: Mapping[str, Any], keys: Mapping[str, Any], family: Family, where: str) -> None:
    for key, effect in NEVER_0.items():
        if key in family.keys and given.get(key) == 0:
            raise UserError(f"{where}: {key} = {given[key]!r} {effect}")
    if "num_experts" in family.keys and not keys.get("num_experts"):
        count = given[family.keys["num_experts"]]
        raise UserError(f"{where}: {family.keys['num_experts']} = {count}; this family has only MoE models")


def _check_quantization(settings: Any, family: Family, where: str) -> None:
    given = {key: settings.get(key) for key in family.quantization} if isinstance(settings, Mapping) else None
    if settings and not (family.quantization and given == family.quantization):
        raise UserError(
            f"{where}: {QUANTIZED} = {shown(settings)}; fourfold cannot read these quantized weights; name the folder "
            "of the unquantized model"
        )


def _windows(given: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Return the keys of [model] that describe sliding-window layers."""
    window, none = given.get("sliding_window"), {"sliding_window": 0, "layer_types": []}
    is_used = given["use_sliding_window"] if "use_sliding_window" in family.defaults else True
    kinds = given.get("layer_types")
    if window is None and family.lists_layer_types and is_used and SLIDING in (kinds or []):
        raise UserError(f"{where}: sliding_window is null, but the '{SLIDING}' layers in layer_types need a window")
    if family.rotating_layers == "only_sliding":
        none["no_rope_layers"] = [0]
    if family.slides is None or window is None or not is_used:
        return none
    layers = count_layers(given, family, where)
    if kinds is not None and not family.lists_layer_types and kinds != [SLIDING] * layers:
        # transformers reads a Mistral file with layer_types as a Ministral model. fourfold does not.
        raise UserError(
            f"{where}: layer_types = {kinds!r}; in fourfold, a sliding_window applies to every layer of model_type "
            f"'{given['model_type']}'; set sliding_window = null if no layer has a window"
        )
    if kinds is None:
        for key in LAYER_NUMBERS.keys() & family.defaults.keys():
            check_count(key, given[key], LAYER_NUMBERS[key], where)
        kinds = [SLIDING if family.slides(layer, given) else FULL for layer in range(layers)]
    check_layer_types(kinds, (FULL, SLIDING), given, family, where)
    if SLIDING in kinds:
        check_count("sliding_window", window, 1, where)
    found = {"sliding_window": window, "layer_types": kinds} if SLIDING in kinds else none
    if family.rotating_layers in ("sliding", "only_sliding"):
        found["no_rope_layers"] = [int(kind == SLIDING) for kind in kinds]
    return found


def _check_head_dim(keys: Mapping[str, Any], family: Family, size: Any, where: str) -> None:
    """Refuse a head size other than hidden_size / num_attention_heads if the family supports no other size."""
    if size is None or "head_dim" in family.keys or keys["position_embedding"] != "rope":
        return
    if "kv_lora_rank" in keys:
        if size != keys["qk_rope_head_dim"]:
            raise UserError(
                f"{where}: head_dim = {size!r}; in this family it is qk_rope_head_dim = {keys['qk_rope_head_dim']}"
            )
        return
    counts = (size, keys["num_attention_heads"], keys["hidden_size"])
    if not all(isinstance(n, int) for n in counts) or counts[0] * counts[1] != counts[2]:
        raise UserError(
            f"{where}: head_dim = {size!r}; a head of this family has hidden_size / num_attention_heads channels"
        )


def local_folder(name: str, patterns: Sequence[str] = (CONFIG_FILE,)) -> Path:
    """Return a model's folder: ``name`` itself, or the local copy of the Hub's model, downloaded if needed.

    Args:
        name: A folder, or an id on the Hub.
        patterns: The files that are needed.

    Raises:
        UserError: The name is neither a folder nor an id on the Hub, the folder has an unsafe link, or the Hub cannot
            be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        check_model_folder(path)
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"there is no folder {name}; give a model's folder, or its id on the Hub, such as org/name")
    import_extra("huggingface_hub", "huggingface", f"there is no folder {name}, and ids of the Hub need")
    import huggingface_hub

    try:
        # Ignore subfolders, because some models, such as GPT-OSS, have a second copy of their weights there.
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns), ignore_patterns="*/*"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"there is no folder {name}, and the Hub has no such model or cannot be reached: {first_line(error)}"
        ) from error


def from_huggingface(section: dict[str, Any]) -> dict[str, Any]:
    """Fill a ``[model]`` table from the config.json that its ``from_hf`` names. The table's own keys take
    precedence."""
    name = section.get("from_hf")
    if name is None:
        return section
    if not isinstance(name, str) or not name:
        raise UserError(
            f"model.from_hf = {shown(name)} is neither a folder nor an id of the Hub, such as 'Qwen/Qwen3-0.6B'"
        )
    if section.get("preset") is not None:
        both = f"model.from_hf = {name!r} and model.preset = {section['preset']!r}"
        raise UserError(f"{both} both give the sizes; leave one of them out")
    return filled(section, model_keys(read_config(local_folder(name)), f"model.from_hf = '{name}'"))


def check_length(name: str, max_position_embeddings: int, seq_length: int) -> None:
    """Raise ``UserError`` if sequences have more tokens than a pretrained model has positions."""
    if seq_length > max_position_embeddings:
        raise UserError(
            f"training.seq_length = {seq_length} is longer than the {max_position_embeddings} positions of '{name}'; "
            "to train on longer sequences, set model.max_position_embeddings"
        )
