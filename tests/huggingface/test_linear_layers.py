"""Layers with linear attention: their types in config.json, and the text models in files of Qwen3.5, which also have a
model for images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_dense_models import DELTA, LINEAR, SIZES, F, S
from tiny_huggingface import make_model, ours_of, perturb, rewrite, tokens, weights_of
from tiny_mixtures import EXPERTS

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import model_of, read_config
from fourfold.huggingface.architectures.families import FAMILIES
from fourfold.huggingface.architectures.written_config import config_of
from fourfold.huggingface.export_model import export_huggingface
from fourfold.huggingface.import_model import import_huggingface

transformers = pytest.importorskip("transformers")

KINDS = [kind for kind, family in FAMILIES.items() if family.has_linear_layers]
LAYERS: dict[str, Any] = {**SIZES, **EXPERTS, **DELTA, "num_hidden_layers": 8, "layer_types": None}


@pytest.mark.parametrize("keys", [{}, {"full_attention_interval": 3}, {"layer_types": [F, LINEAR] * 4}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_linear_as_in_transformers(kind: str, keys: dict[str, Any]) -> None:
    config = {"model_type": kind, **LAYERS, **keys}
    model = model_of(config, "config.json")
    assert [model.type_of(layer) for layer in range(8)] == transformers.AutoConfig.for_model(**config).layer_types
    assert model_of(config_of(model, kind), "config.json") == model


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"layer_types": [S, LINEAR] * 4}, "fourfold supports 'full_attention' and 'linear_attention' layers"),
        (
            {"layer_types": [F, LINEAR]},
            "layer_types has 2 entries, but num_hidden_layers = 8; give one entry for each layer",
        ),
        ({"full_attention_interval": 0}, "full_attention_interval = 0 is not an integer of at least 1"),
        ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is null"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads = 3 does not divide linear_num_value_heads = 4"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_malformed_layers_are_refused(kind: str, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        model_of({"model_type": kind, **LAYERS, **keys}, "config.json")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "qwen3_next")
    expected = ours_of(folder)(tokens())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    save_file({"mtp.fc.weight": torch.ones(2, 2)}, folder / "extra.safetensors")
    index["weight_map"]["mtp.fc.weight"] = "extra.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(ours_of(folder)(tokens()), expected)


def make_with_images(folder: Path, kind: str) -> Path:
    """Save a small random model for images and text."""
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16, "patch_size": 4,
    }  # fmt: skip
    torch.manual_seed(1)
    config_class = transformers.CONFIG_MAPPING[kind]
    config = config_class(text_config=SIZES | EXPERTS | DELTA, vision_config=vision, tie_word_embeddings=False)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    perturb(model)
    model.save_pretrained(folder)
    return folder


def stack_experts(folder: Path) -> None:
    """Store the experts of a layer in two tensors, as published files do."""
    weights = weights_of(folder)
    prefixes = {name.partition(".experts.")[0] + ".experts" for name in weights if ".experts." in name}
    for prefix in prefixes:
        gate, up, down = (
            torch.stack([weights.pop(f"{prefix}.{e}.{name}_proj.weight") for e in range(EXPERTS["num_experts"])])
            for name in ("gate", "up", "down")
        )
        weights |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    rewrite(folder, weights)


@pytest.mark.parametrize(("kind", "stacks"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)])
def test_the_text_model_next_to_an_image_model_is_read(kind: str, stacks: bool, tmp_path: Path) -> None:
    """In these files, names have another prefix. The published files stack the experts of a layer."""
    folder = make_with_images(tmp_path / "hf", kind)
    if stacks:
        stack_experts(folder)
    names = weights_of(folder).keys()
    assert all(name.startswith(("model.language_model.", "model.visual.", "lm_head.")) for name in names)
    assert ("model.language_model.layers.1.mlp.experts.gate_up_proj" in names) == stacks
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        expected, logits = theirs(tokens()).logits, ours_of(folder)(tokens())
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())

    assert import_huggingface(str(folder), tmp_path / "ours").kind == f"{kind}_text"
    assert export_huggingface(tmp_path / "ours", tmp_path / "text").kind == f"{kind}_text"
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager").eval()
    assert type(alone).__name__ in read_config(tmp_path / "text")["architectures"]
    with torch.no_grad():
        assert torch.equal(alone(tokens()).logits, expected)


def test_the_preset_of_qwen3_5_is_its_config_json(tmp_path: Path) -> None:
    """The test has the keys of Qwen/Qwen3.5-35B-A3B."""
    rope = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu",
        "full_attention_interval": 4, "layer_types": [LINEAR, LINEAR, LINEAR, F] * 10, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "max_position_embeddings": 262144, "moe_intermediate_size": 512,
        "num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512, "rms_norm_eps": 1e-6,
        "rope_parameters": {**rope, "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        "mtp_num_hidden_layers": 1, "attention_bias": False, "attn_output_gate": True,
    }  # fmt: skip
    published = {
        "model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text,
        "vision_config": {"model_type": "qwen3_5_moe"}, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert model_of(read_config(tmp_path), "config.json") == ModelConfig(**PRESETS["qwen3.5-35b-a3b"])
