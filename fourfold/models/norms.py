"""RMSNorm and LayerNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.model import ModelConfig
from fourfold.models.recomputation import recomputable


class RMSNorm(nn.Module):
    """Computes x / rms(x) · weight, with float32 statistics (Zhang & Sennrich 2019, arXiv 1910.07467).

    Args:
        zero_centered: multiply by (1 + weight) in float32 (Gemma, arXiv 2403.08295).
    """

    def __init__(self, size: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.zero_centered = eps, zero_centered

    @recomputable
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Return x / rms(x) · weight, as in ``RMSNorm``."""
    normal = F.rms_norm(x.float(), (x.shape[-1],), eps=eps)
    if zero_centered:
        return (normal * (1 + weight.float())).to(x.dtype)
    return normal.to(x.dtype) * weight


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, with a forward that the backward can recompute."""

    forward = recomputable(nn.LayerNorm.forward)


def norm_of(config: ModelConfig) -> RMSNorm | LayerNorm:
    """Return a norm for hidden states, of the type that the model uses."""
    if config.norm == "layernorm":
        return LayerNorm(config.hidden_size, eps=config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps, config.zero_centered_norm)
