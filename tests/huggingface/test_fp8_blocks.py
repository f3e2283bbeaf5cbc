"""Weights in FP8 blocks, as in DeepSeek-V3's files, are read as the FP8 values times the factor of their block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mutation import mutated
from tiny_huggingface import make_model, ours_of, rewrite, tokens, weights_of
from torch import Tensor

from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import read_config
from fourfold.huggingface.export_model import export_huggingface
from fourfold.huggingface.import_model import import_huggingface
from fourfold.huggingface.weights import Pretrained

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 160, "intermediate_size": 136, "q_lora_rank": 144, "rope_parameters": {"rope_type": "default"}}
"""Rows and columns fill several blocks. The last blocks are smaller."""
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def in_blocks(weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix in FP8, random factors of its blocks, and the matrix that they stand for."""
    stored = weight.float().mul(8).to(torch.float8_e4m3fn)
    rows, columns = (-(-size // 128) for size in weight.shape)
    factors = torch.rand(rows, columns, generator=generator) / 8
    whole = stored.float()
    for row in range(rows):
        for column in range(columns):
            whole[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)] *= factors[row, column]
    return stored, factors, whole.bfloat16()


def pack(folder: Path, **settings: Any) -> dict[str, Tensor]:
    """Store the linear layers in FP8. Return all weights, with these layers in bf16."""
    generator = torch.Generator().manual_seed(4)
    stored, plain = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in weights_of(folder).items():
        stored[name] = plain[name] = weight
        if weight.ndim == 2 and any(part in name for part in ("_proj.weight", "kv_a_proj", "in_proj_qkvz")):
            stored[name], stored[name + "_scale_inv"], plain[name] = in_blocks(weight, generator)
    rewrite(folder, stored)
    config = read_config(folder) | {"quantization_config": FP8 | settings}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


@pytest.mark.parametrize(
    ("name", "sizes"), [("deepseek_v3", SIZES), ("qwen3_next", {"hidden_size": 160, "linear_value_head_dim": 80})]
)
def test_blocks_are_multiplied_by_their_factors(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", name, torch.bfloat16, **sizes)
    plain = pack(folder)
    import_huggingface(str(folder), tmp_path / "ours")
    export_huggingface(tmp_path / "ours", tmp_path / "back")
    back = weights_of(tmp_path / "back")
    assert back.keys() == plain.keys()
    for name, weight in plain.items():
        assert torch.equal(back[name], weight), name
    assert "quantization_config" not in read_config(tmp_path / "back")


def test_a_part_of_a_matrix_is_the_same_as_in_the_whole(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "deepseek_v3", torch.bfloat16, **SIZES)
    pack(folder)
    pretrained = Pretrained(folder, ours_of(folder).config)
    name = "layers.0.self_attn.q.q_rope_proj.weight"
    whole = pretrained.read(name)
    part = torch.empty(9, 21, dtype=torch.bfloat16)
    pretrained.read_into(part, name, (slice(11, 20), slice(120, 141)))
    assert torch.equal(part, whole[11:20, 120:141])


def test_the_test_would_see_factors_of_other_blocks(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "deepseek_v3", torch.bfloat16, **SIZES)
    plain = pack(folder)["model.layers.0.self_attn.o_proj.weight"]
    pretrained = Pretrained(folder, ours_of(folder).config)
    with mutated(
        "fourfold.huggingface.fp8_blocks:ScaledMatrix.read_into", "whole[row_blocks]", "whole[0 * row_blocks]"
    ):
        assert not torch.equal(pretrained.read("layers.0.self_attn.o_proj.weight"), plain)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_block_size": [64, 64]}, "cannot read these quantized weights"),
        ({"quant_method": "awq"}, "quantized weights"),
    ],
)
def test_other_blocks_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = make_model(tmp_path / "hf", "deepseek_v3", torch.bfloat16, **SIZES)
    pack(folder, **settings)
    with pytest.raises(UserError, match=message):
        import_huggingface(str(folder), tmp_path / "ours")


def test_missing_and_damaged_factors_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "deepseek_v3", torch.bfloat16, **SIZES)
    pack(folder)
    name = "model.layers.0.self_attn.o_proj.weight"
    weights = weights_of(folder)
    rewrite(folder, {key: weight for key, weight in weights.items() if key != name + "_scale_inv"})
    with pytest.raises(UserError, match="is stored as F8_E4M3"):
        import_huggingface(str(folder), tmp_path / "missing")
    rewrite(folder, weights | {name + "_scale_inv": torch.full_like(weights[name + "_scale_inv"], torch.inf)})
    with pytest.raises(UserError, match="NaN or infinite"):
        import_huggingface(str(folder), tmp_path / "damaged")


def test_logits_equal_the_logits_of_unpacked_weights(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "deepseek_v3", torch.bfloat16, **SIZES)
    plain = pack(folder)
    ours = ours_of(folder)(tokens())
    config = {key: value for key, value in read_config(folder).items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, plain)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(ours, theirs(tokens()).logits, atol=1e-4, rtol=1e-4)
