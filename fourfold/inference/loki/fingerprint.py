"""Identify the model of a basis by the model's sizes, rotary embedding, and a sample of its attention weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourfold.errors import UserError
from fourfold.inference.loki.architecture import AttentionModule

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SAMPLES = 32
"""Number of values taken from each attention matrix."""

TOLERANCE = 2**-6
"""Relative tolerance for comparing weights that may have been cast to another dtype. It is four times the largest
relative rounding error of bfloat16, which is 2^-8."""

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


@dataclass(frozen=True)
class Fingerprint:
    """The properties of a model that are stored with a Loki basis. These properties tell whether the basis belongs to
    another model."""

    model: str
    """Type and sizes of the model."""
    rope: str
    """Parameters of the rotary embedding, as JSON."""
    sample: Tensor
    """Up to ``SAMPLES`` values of each attention matrix, in float32."""

    @classmethod
    def of(cls, config: PreTrainedConfig, attentions: Sequence[AttentionModule]) -> Fingerprint:
        """Return a model's fingerprint, from its text configuration and its attention modules."""
        sizes = [f"{name} {value}" for name in SIZES if (value := getattr(config, name, None)) is not None]
        rope = getattr(config, "rope_parameters", None) or {}
        parts = [
            sample_matrix(parameter)
            for attention in attentions
            for name, parameter in sorted(attention.named_parameters())
            # Leave out LoRA adapters, so that a basis fits the model with and without them.
            if parameter.ndim == 2 and "lora_" not in name
        ]
        return cls(
            ", ".join([config.model_type, *sizes]), json.dumps(rope, sort_keys=True, default=str), torch.cat(parts)
        )

    def check(self, other: Fingerprint) -> None:
        """Check that the model in use is the calibrated model.

        Args:
            other: The fingerprint of the model in use.

        Raises:
            UserError: The fingerprints differ.
        """
        again = "calibrate this model with: fourfold loki calibrate"
        if self.model != other.model:
            raise UserError(f"the basis belongs to the model {self.model}, not to {other.model}; {again}")
        if self.rope != other.rope:
            raise UserError(
                f"the basis was made with the rotary embedding {self.rope}, but this model has {other.rope}; {again}"
            )
        if self.sample.shape != other.sample.shape or not _same(self.sample, other.sample):
            raise UserError(f"the basis belongs to a model with other weights; {again}")


def sample_matrix(parameter: Tensor) -> Tensor:
    """Return evenly spaced values of a matrix, including the first and the last, in float32."""
    flat = parameter.detach().flatten()
    samples = min(SAMPLES, flat.numel())
    places = [sample * (flat.numel() - 1) // max(1, samples - 1) for sample in range(samples)]
    return flat[torch.tensor(places, device=flat.device)].float().cpu()


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether values are equal up to the rounding of a change of dtype. Such a change can round tiny values to
    zero, so there is also an absolute tolerance."""
    small = 1e-6 + 1e-4 * a.abs().mean()
    return bool(((a - b).abs() <= TOLERANCE * a.abs() + small).all())
