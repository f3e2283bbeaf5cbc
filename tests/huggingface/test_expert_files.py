"""Transformers' own table tells which rows of a parameter each tensor in the files holds."""

from __future__ import annotations

import re

import pytest
import torch
from parallelized_models import make
from torch import Tensor, nn

from fourfold.huggingface.expert_files import rows_in_files

core_model_loading = pytest.importorskip("transformers.core_model_loading")

DOWN = "model.layers.0.mlp.experts.down_proj"
UP = "model.layers.0.mlp.experts.gate_up_proj"


def test_the_converters_of_transformers_get_two_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process runs transformers' converters to find where rows go. Two columns are enough for this, so the
    converters copy little."""
    model, sizes, convert = make("olmoe"), {}, core_model_loading.revert_weight_conversion

    def recorded(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        sizes.update({name: tensor.shape for name, tensor in tensors.items()})
        return convert(model, tensors)

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", recorded)
    rows = rows_in_files(model)
    assert sizes[DOWN] == (4, 64, 2) and sizes["lm_head.weight"] == (208, 2) and sizes["model.norm.weight"] == (64,)
    assert rows[DOWN] == {
        f"model.layers.0.mlp.experts.{e}.down_proj.weight": range(64 * e, 64 * (e + 1)) for e in range(4)
    }
    wide = model.get_parameter(UP).shape[1] // 2
    gates = {f"model.layers.0.mlp.experts.{e}.gate_proj.weight": 2 * wide * e for e in range(4)}
    ups = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": 2 * wide * e + wide for e in range(4)}
    assert rows[UP] == {name: range(first, first + wide) for name, first in (gates | ups).items()}


def test_a_matrix_that_files_transpose_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"their.{name}": tensor.mT.contiguous() for name, tensor in tensors.items() if tensor.ndim > 1}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", transposed)
    assert rows_in_files(make("llama"))["lm_head.weight"] == {"lm_head.weight": range(208)}


def test_a_stack_of_experts_may_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite's files stack experts as the modules do."""

    def renamed(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"their.{name}": tensor for name, tensor in tensors.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", renamed)
    assert rows_in_files(make("olmoe"))[DOWN] == {f"their.{DOWN}": range(4 * 64)}


def test_parameters_that_files_join_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sarvam's files store queries, keys, and values as one matrix, so none of these parameters has its own tensor in
    the files."""

    def joined(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {re.sub("[qkv]_proj", "query_key_value", name): tensor for name, tensor in tensors.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", joined)
    model = make("llama")
    rows = rows_in_files(model)
    for part in "qkvo":
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        assert rows[name] == {name: range(len(model.get_parameter(name)))}


def test_a_parameter_without_dims_keeps_its_name() -> None:
    model = make("llama")
    model.scale = nn.Parameter(torch.ones(()))
    assert rows_in_files(model)["scale"] == {"scale": range(1)}
