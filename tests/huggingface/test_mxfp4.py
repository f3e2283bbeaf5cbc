"""fourfold reads the same weights as transformers from GPT-OSS's files with experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mutation import mutated
from tiny_huggingface import make_model, ours_of, rewrite, tokens, weights_of
from torch import Tensor

from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import model_of, read_config
from fourfold.huggingface.export_model import export_huggingface
from fourfold.huggingface.import_model import import_huggingface
from fourfold.huggingface.weights import Pretrained

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 96, "intermediate_size": 64}
PACKED = ("gate_up_proj", "down_proj")


def pack(folder: Path) -> dict[str, Tensor]:
    """Replace the experts' matrices by random ones in MXFP4. Return all weights, with these matrices as transformers
    unpacks them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(4)
    stored, unpacked = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in weights_of(folder).items():
        stored[name] = unpacked[name] = weight
        if name.endswith(PACKED):
            experts, inputs, outputs = stored.pop(name).shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            unpacked[name] = convert_moe_packed_tensors(blocks, scales)
            assert unpacked[name].shape == weight.shape
    rewrite(folder, stored)
    config = read_config(folder) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return unpacked


def test_packed_experts_equal_transformers(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "gpt_oss", torch.bfloat16, **SIZES)
    unpacked = pack(folder)
    import_huggingface(str(folder), tmp_path / "ours")
    export_huggingface(tmp_path / "ours", tmp_path / "back")
    back = weights_of(tmp_path / "back")
    assert back.keys() == unpacked.keys()
    for name, weight in unpacked.items():
        assert back[name].dtype == torch.bfloat16 and torch.equal(back[name], weight), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        expected, logits = theirs(tokens()).logits, ours_of(folder)(tokens())
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_any_part_of_a_packed_matrix_can_be_read(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "gpt_oss", torch.bfloat16, **SIZES)
    pack(folder)
    pretrained = Pretrained(folder, model_of(read_config(folder), "config.json"))
    name = f"layers.1.mlp.experts.{name}"
    whole = pretrained.read(name)
    slices = (slice(1, 4), slice(5, 48), slice(17, 50))
    part = torch.empty(3, 43, 33)
    pretrained.read_into(part, name, slices)
    assert torch.equal(part, whole[slices].float())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scales_OG.int() - SCALE_OF_ONE", "scales_OG.int() - SCALE_OF_ONE + 1"),
        (
            "[values[(blocks_OGb & 15).int()], values[(blocks_OGb >> 4).int()]]",
            "[values[(blocks_OGb >> 4).int()], values[(blocks_OGb & 15).int()]]",
        ),
    ],
    ids=["scales are twice as large", "the upper half of a byte comes first"],
)
def test_the_comparison_with_transformers_catches(old: str, new: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "gpt_oss", torch.bfloat16, **SIZES)
    expected = pack(folder)["model.layers.0.mlp.experts.down_proj"]
    pretrained = Pretrained(folder, model_of(read_config(folder), "config.json"))
    name = "layers.0.mlp.experts.down_proj"
    assert torch.equal(pretrained.read(name).mT, expected)
    with mutated("fourfold.huggingface.mxfp4:unpacked", old, new):
        assert not torch.equal(pretrained.read(name).mT, expected)


def test_damaged_scales_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "gpt_oss", torch.bfloat16, **SIZES)
    pack(folder)
    weights = weights_of(folder)
    scales = next(name for name in sorted(weights) if name.endswith("down_proj_scales"))
    rewrite(folder, weights | {scales: torch.full_like(weights[scales], 255)})
    with pytest.raises(UserError, match="scales that make values infinite"):
        import_huggingface(str(folder), tmp_path / "ours")
    rewrite(folder, {name: weight for name, weight in weights.items() if name != scales})
    with pytest.raises(UserError, match=f"no file has the tensor {scales}"):
        import_huggingface(str(folder), tmp_path / "ours")


def test_other_families_and_formats_are_refused(tmp_path: Path) -> None:
    config = read_config(make_model(tmp_path / "hf", "gpt_oss"))
    other = read_config(make_model(tmp_path / "other", "llama"))
    for refused in (
        config | {"quantization_config": {"quant_method": "fp8"}},
        other | {"quantization_config": {"quant_method": "mxfp4"}},
    ):
        with pytest.raises(UserError, match="cannot read these quantized weights"):
            model_of(refused, "config.json")


def test_scales_of_safetensors_own_type_are_the_same_bytes(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "gpt_oss", torch.bfloat16, **SIZES)
    expected = pack(folder)["model.layers.0.mlp.experts.down_proj"]
    stored = weights_of(folder)
    rewrite(folder, {n: w.view(torch.float8_e8m0fnu) if n.endswith("_scales") else w for n, w in stored.items()})
    pretrained = Pretrained(folder, model_of(read_config(folder), "config.json"))
    assert torch.equal(pretrained.read("layers.0.mlp.experts.down_proj").mT, expected)


@pytest.mark.parametrize("kind", ["_blocks", "_scales"])
def test_packed_tensors_that_are_no_bytes_are_refused(kind: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "gpt_oss", torch.bfloat16, **SIZES)
    pack(folder)
    stored = weights_of(folder)
    rewrite(folder, {name: w.float() if name.endswith(kind) else w for name, w in stored.items()})
    with pytest.raises(UserError, match=f"{kind} has the dtype F32; only U8"):
        import_huggingface(str(folder), tmp_path / "ours")


@pytest.mark.parametrize("kind", ["_blocks", "_scales"])
def test_a_missing_half_of_a_packed_tensor_is_named(kind: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "gpt_oss", torch.bfloat16, **SIZES)
    pack(folder)
    rewrite(folder, {name: w for name, w in weights_of(folder).items() if not name.endswith(kind)})
    with pytest.raises(UserError, match=kind):
        import_huggingface(str(folder), tmp_path / "ours")


def test_rows_that_are_not_whole_blocks_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "gpt_oss", torch.bfloat16, hidden_size=48, intermediate_size=64)
    packed = {n: w for n, w in weights_of(folder).items() if not n.endswith(PACKED)}
    for name, weight in weights_of(folder).items():
        if name.endswith(PACKED):
            experts, inputs, outputs = weight.shape
            packed[f"{name}_blocks"] = torch.zeros(experts, outputs, inputs // 32, 16, dtype=torch.uint8)
            packed[f"{name}_scales"] = torch.zeros(experts, outputs, inputs // 32, dtype=torch.uint8)
    rewrite(folder, packed)
    with pytest.raises(UserError, match="rows of 48 numbers, which do not divide into blocks of 32"):
        import_huggingface(str(folder), tmp_path / "ours")
