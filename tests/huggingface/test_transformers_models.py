"""Opening models of transformers for inference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_huggingface import make_model

from fourfold.errors import UserError
from fourfold.huggingface.transformers_models import load_model

transformers = pytest.importorskip("transformers")

MISSING = "model.layers.0.mlp.up_proj.weight"


def test_a_missing_tensor_is_refused_and_not_filled_at_random(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text(encoding="utf-8"))
    file = folder / index["weight_map"].pop(MISSING)
    index_file.write_text(json.dumps(index), encoding="utf-8")
    tensors = load_file(file)
    del tensors[MISSING]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"its files lack the tensor {MISSING}"):
        load_model(folder)


def test_a_tensor_without_a_place_is_refused_and_not_left_out(tmp_path: Path) -> None:
    """Otherwise an audit of only a part of the model would report too little memorization."""
    folder = make_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    last = config["num_hidden_layers"] - 1
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": last}), encoding="utf-8")
    with pytest.raises(UserError, match=f"has no place for the tensor model.layers.{last}."):
        load_model(folder)


def test_a_layer_that_predicts_further_tokens_is_left_out(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "glm4_moe")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    last = config["num_hidden_layers"] - 1
    announced = {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | announced), encoding="utf-8")
    assert load_model(folder).config.num_hidden_layers == last
