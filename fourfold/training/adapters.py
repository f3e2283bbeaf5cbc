"""LoRA adapters out: as peft reads them, or merged into the model that they belong to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.config.huggingface import local_folder
from fourfold.config.run import LoRAConfig
from fourfold.data.files import write_whole
from fourfold.errors import UserError
from fourfold.models.huggingface import TheirTensor
from fourfold.models.pretrained import Pretrained
from fourfold.models.tensor_files import Entry, write_tensors
from fourfold.training.saved_weights import SavedWeights

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def write_adapter(folder: Path, saved: SavedWeights, pretrained: Pretrained) -> dict[str, int]:
    """Write what ``peft.PeftModel.from_pretrained`` opens; the bytes of its file.

    Raises ``UserError`` for a family that joins projections: peft's adapter of a joined one is another thing than
    adapters of its parts.
    """
    lora = _lora(saved)
    entries: list[Entry] = []
    targets: set[str] = set()
    for tensor, kind in _adapted(saved, pretrained.tensors, pretrained.kind):
        module = tensor.name.removesuffix(".weight")
        targets.add(module.rpartition(".")[2])
        for part in ("A", "B"):
            name = f"{kind}.lora_{part}"
            make = partial(_padded_off, saved, name, tensor.shape[0] if part == "B" else lora.rank)
            shape = (tensor.shape[0], lora.rank) if part == "B" else (lora.rank, tensor.shape[1])
            entries.append(Entry(f"base_model.model.{module}.lora_{part}.weight", saved.dtypes[name], shape, make))
    write_tensors(folder / ADAPTER_FILE, entries)
    write_whole(
        folder / ADAPTER_CONFIG, (json.dumps(_peft_config(saved, lora, sorted(targets)), indent=2) + "\n").encode()
    )
    return {ADAPTER_FILE: (folder / ADAPTER_FILE).stat().st_size}


class Merged:
    """The weights of a base model with a checkpoint's adapters added: W + α/r · B A, in float32 and then rounded."""

    def __init__(self, saved: SavedWeights, pretrained: Pretrained) -> None:
        self.saved, self.pretrained, self.lora = saved, pretrained, _lora(saved)
        self.shapes = pretrained.shapes
        self.dtypes: Mapping[str, torch.dtype] = {name: pretrained.dtype(name) for name in pretrained.shapes}

    def read(self, name: str) -> Tensor:
        """One whole parameter."""
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        self.pretrained.read_into(whole, name, tuple(slice(0, n) for n in whole.shape))
        module = name.removesuffix(".weight")
        if f"{module}.lora_A" not in self.saved.shapes:
            return whole
        a, b = (self.saved.read(f"{module}.lora_{part}").float() for part in ("A", "B"))
        return whole.float().addmm_(b, a, alpha=self.lora.alpha / self.lora.rank).to(whole.dtype)


def open_base(saved: SavedWeights, patterns: Sequence[str]) -> Pretrained:
    """The model that a checkpoint's adapters belong to."""
    assert saved.state.base is not None
    return Pretrained(local_folder(saved.state.base, patterns), saved.model)


def _adapted(saved: SavedWeights, tensors: Sequence[TheirTensor], kind: str) -> list[tuple[TheirTensor, str]]:
    """Their tensors that have an adapter, and the name of our layer."""
    found: list[tuple[TheirTensor, str]] = []
    for tensor in tensors:
        layers = [piece.name.removesuffix(".weight") for piece in tensor.pieces if piece.name.endswith(".weight")]
        adapted = [layer for layer in layers if f"{layer}.lora_A" in saved.shapes]
        if adapted and (len(layers) > 1 or tensor.transposed):
            raise UserError(
                f"peft has one adapter for {tensor.name} of model_type '{kind}', and here its parts have their own; "
                "export with --merge"
            )
        found += [(tensor, layer) for layer in adapted]
    return found


def _padded_off(saved: SavedWeights, name: str, rows: int) -> Tensor:
    return saved.read(name)[:rows]


def _lora(saved: SavedWeights) -> LoRAConfig:
    assert saved.state.lora is not None
    return saved.state.lora


def _peft_config(saved: SavedWeights, lora: LoRAConfig, targets: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": saved.state.base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
