"""Which model a basis belongs to: its sizes, its rotary embedding, and a sample of its attention weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.errors import UserError

SAMPLES = 32  # of each matrix of each attention
TOLERANCE = 2**-6
"""Relative: as much as a weight may change when it is rounded to bfloat16 or float16, and no more than twice that."""

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


@dataclass(frozen=True)
class Fingerprint:
    """model: type and sizes; rope: its parameters; sample: float32 numbers out of the attention's matrices."""

    model: str
    rope: str
    sample: Tensor

    @classmethod
    def of(cls, config: Any, attentions: list[torch.nn.Module]) -> Fingerprint:
        """Of a model of transformers, by its text config and the attention modules of its layers."""
        sizes = [f"{name} {value}" for name in SIZES if (value := getattr(config, name, None)) is not None]
        rope = getattr(config, "rope_parameters", None) or {}
        parts = [
            _sample(parameter)
            for attention in attentions
            for name, parameter in sorted(attention.named_parameters())
            if parameter.ndim == 2 and "lora_" not in name  # an adapter beside the weights leaves these what they are
        ]
        return cls(
            ", ".join([config.model_type, *sizes]), json.dumps(rope, sort_keys=True, default=str), torch.cat(parts)
        )

    def check(self, other: Fingerprint) -> None:
        """Raise ``UserError`` unless ``other``, of the model at hand, is the same."""
        again = "make one for this model with: fourfold loki calibrate"
        if self.model != other.model:
            raise UserError(f"the basis is of another model ({self.model}) than this ({other.model}); {again}")
        if self.rope != other.rope:
            raise UserError(
                f"the basis was made with the rotary embedding {self.rope}, this model has {other.rope}; {again}"
            )
        if self.sample.shape != other.sample.shape or not _same(self.sample, other.sample):
            raise UserError(f"the basis is of another model of the same sizes: its weights differ; {again}")


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().flatten()
    samples = min(SAMPLES, flat.numel())
    places = [sample * (flat.numel() - 1) // max(1, samples - 1) for sample in range(samples)]
    return flat[torch.tensor(places, device=flat.device)].float().cpu()


def _same(a: Tensor, b: Tensor) -> bool:
    """Up to a change of type; numbers far below the usual size may round to anything near zero."""
    small = 1e-6 + 1e-4 * a.abs().mean()
    return bool(((a - b).abs() <= TOLERANCE * a.abs() + small).all())
