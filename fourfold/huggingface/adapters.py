"""Export LoRA adapters in peft's format, or merged into their base model."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.checkpoints.saved_weights import SavedWeights
from fourfold.config.low_rank import LoRAConfig
from fourfold.data.atomic_files import write_whole
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import local_folder
from fourfold.huggingface.model_folder import PATTERNS
from fourfold.huggingface.weight_names import TensorPiece, TheirTensor
from fourfold.huggingface.weights import Pretrained
from fourfold.models.tensor_files import Entry, write_tensors
from fourfold.untrusted_files import ADAPTER_CONFIG

ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class Adapted:
    """The peft adapter of one Hugging Face tensor. The tensor may join several of fourfold's parameters, each with its
    own adapter of rank r.

    The joint adapter's rank (``whole_rank``) is r times the number of parameters. The joint A stacks the parameters' A
    matrices. The joint B is block-diagonal, with the parameters' B matrices as blocks. So B·A has exactly the same
    effect as the parameters' own adapters.
    """

    tensor: TheirTensor
    parts: tuple[TensorPiece, ...]
    """The pieces of the tensor that belong to parameters with an adapter."""
    rank: int
    """The rank r of each parameter's own adapter."""

    @property
    def module(self) -> str:
        return self.tensor.name.removesuffix(".weight")

    @property
    def whole_rank(self) -> int:
        return self.rank * len(self.parts)

    @property
    def features(self) -> tuple[int, int]:
        """Return (output features, input features)."""
        first, second = self.tensor.shape
        return (second, first) if self.tensor.transposed else (first, second)

    def a(self, saved: SavedWeights) -> Tensor:
        """Return the joint A [whole_rank, in]."""
        return torch.cat([saved.read(_layer(part) + ".lora_A") for part in self.parts])

    def b(self, saved: SavedWeights) -> Tensor:
        """Return the joint B [out, whole_rank]."""
        parts = [saved.read(_layer(part) + ".lora_B") for part in self.parts]
        whole = parts[0].new_zeros(self.features[0], self.whole_rank)
        for number, (part, b) in enumerate(zip(self.parts, parts, strict=True)):
            for here, there in part.runs(slice(0, part.rows)):
                whole[there, number * self.rank : (number + 1) * self.rank] = b[here]
        return whole


def write_adapter(folder: Path, saved: SavedWeights, pretrained: Pretrained) -> dict[str, int]:
    """Write a folder for ``peft.PeftModel.from_pretrained``. Return a dict with the name of the weight file and its
    size in bytes.

    Args:
        folder: The folder to write to.
        saved: The checkpoint with the adapters.
        pretrained: The base model.

    Raises:
        UserError: The adapters are in the MLP of an MoE model, which peft cannot read.
    """
    lora = _lora(saved)
    entries: list[Entry] = []
    adapted = _adapted(saved, pretrained.tensors, lora.rank)
    if saved.model.num_experts and any(".mlp." in each.module for each in adapted):
        raise UserError(
            "peft reads adapters of gate_proj, up_proj, and down_proj in an MoE model as adapters of the experts, "
            "but the experts have no adapters; export the merged model with --merge, or train with lora.targets in "
            "the attention"
        )
    for each in adapted:
        dtype = saved.dtypes[_layer(each.parts[0]) + ".lora_A"]
        out, inner = each.features
        name = f"base_model.model.{each.module}.lora_"
        entries.append(Entry(f"{name}A.weight", dtype, (each.whole_rank, inner), partial(each.a, saved)))
        entries.append(Entry(f"{name}B.weight", dtype, (out, each.whole_rank), partial(each.b, saved)))
    write_tensors(folder / ADAPTER_FILE, entries)
    config = json.dumps(_peft_config(saved, lora, adapted), indent=2) + "\n"
    write_whole(folder / ADAPTER_CONFIG, config.encode())
    return {ADAPTER_FILE: (folder / ADAPTER_FILE).stat().st_size}


class Merged:
    """The weights of a base model merged with a checkpoint's adapters: W + α/r · B A, computed in float32 and then
    rounded to the dtype of W."""

    def __init__(self, saved: SavedWeights, pretrained: Pretrained) -> None:
        self.saved, self.pretrained, self.lora = saved, pretrained, _lora(saved)
        self.shapes = pretrained.shapes
        self.dtypes: Mapping[str, torch.dtype] = {name: pretrained.dtype(name) for name in pretrained.shapes}

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """Read one full parameter, or one expert of a parameter that stacks experts."""
        whole = self.pretrained.read(name, expert)
        module = name.removesuffix(".weight")
        if f"{module}.lora_A" not in self.saved.shapes:
            return whole
        a, b = (self.saved.read(f"{module}.lora_{part}").float() for part in ("A", "B"))
        return whole.float().addmm_(b, a, alpha=self.lora.alpha / self.lora.rank).to(whole.dtype)


def open_base(saved: SavedWeights) -> Pretrained:
    """Open the base model that a checkpoint's adapters belong to."""
    assert saved.state.base is not None
    return Pretrained(local_folder(saved.state.base, PATTERNS), saved.model)


def _adapted(saved: SavedWeights, tensors: Sequence[TheirTensor], rank: int) -> list[Adapted]:
    """Return the joint adapter of each Hugging Face tensor that has adapters."""
    found: list[Adapted] = []
    for tensor in tensors:
        parts = tuple(piece for piece in tensor.pieces if f"{_layer(piece)}.lora_A" in saved.shapes)
        if parts:
            found.append(Adapted(tensor, parts, rank))
    return found


def _layer(piece: TensorPiece) -> str:
    """Return the name of the module that a piece's weight belongs to."""
    return piece.name.removesuffix(".weight")


def _lora(saved: SavedWeights) -> LoRAConfig:
    assert saved.state.lora is not None
    return saved.state.lora


def _peft_config(saved: SavedWeights, lora: LoRAConfig, adapted: Sequence[Adapted]) -> dict[str, Any]:
    """Return the content of adapter_config.json. Joint adapters have their own rank, and also need their own alpha,
    because peft scales by alpha / rank."""
    joined = {each.module: len(each.parts) for each in adapted if len(each.parts) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": saved.state.base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "rank_pattern": {name: parts * lora.rank for name, parts in joined.items()},
        "alpha_pattern": {name: parts * lora.alpha for name, parts in joined.items()},
        "lora_dropout": 0.0,
        "target_modules": sorted({re.sub(r".*\.\d+\.", "", each.module) for each in adapted}),
        "bias": "none",
        "fan_in_fan_out": any(each.tensor.transposed for each in adapted),
        "inference_mode": True,
    }
