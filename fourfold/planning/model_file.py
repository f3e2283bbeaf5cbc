"""A model named by a preset, or by the config.json of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fourfold.config.model import ModelConfig
from fourfold.config.presets import with_preset
from fourfold.errors import UserError

GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "smollm3")
GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
}
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


def load_model(name: str) -> tuple[ModelConfig, str]:
    """The sizes of a preset, a config.json, or a folder that has one; and a short name. ``UserError`` otherwise."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json":
        return ModelConfig.model_validate(with_preset({"preset": name})), name
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}; give a preset, a config.json or its folder"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    return _from_huggingface(table, str(path)), path.parent.name or path.stem


def _from_huggingface(table: dict[str, Any], where: str) -> ModelConfig:
    kind = table.get("model_type", "")
    if table.get("num_local_experts") or table.get("num_experts") or table.get("n_routed_experts"):
        raise UserError(f"{where}: a mixture of experts cannot be planned; give a dense model")
    if kind == "gpt2":
        values = {ours: table[theirs] for theirs, ours in GPT2_KEYS.items() if table.get(theirs) is not None}
        values |= {key: table[key] for key in ("vocab_size", "tie_word_embeddings") if key in table}
        values.setdefault("tie_word_embeddings", True)
        values |= {"mlp": "gelu", "norm": "layernorm", "position_embedding": "learned"}
        values |= dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), True)
    elif kind in GATED:
        values = {key: table[key] for key in SIZES if table.get(key) is not None}
        values["attention_bias"] = bool(table.get("attention_bias", kind == "qwen2"))
        values["qk_norm"] = kind == "qwen3"
    else:
        raise UserError(f"{where}: model_type '{kind}' is unknown; there are gpt2, {', '.join(GATED)}")
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{where}: {'.'.join(map(str, first['loc'])) or 'sizes'}: {first['msg']}") from None
