"""The norms that a decoder can have: RMSNorm and LayerNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.model import ModelConfig
from fourfold.models.recomputation import recomputable


class RMSNorm(nn.Module):
    """Computes x / rms(x) · weight, with float32 statistics (Zhang & Sennrich 2019, arXiv 1910.07467).

    By default, x / rms(x) is rounded to the dtype of x before it is multiplied by the weight.

    Args:
        zero_centered: multiply by (1 + weight), in float32 (Gemma, arXiv 2403.08295).
        rounds_last: multiply by the weight in float32, and round only the result (GPT-OSS).
    """

    def __init__(self, size: int, eps: float, zero_centered: bool = False, rounds_last: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.zero_centered, self.rounds_last = eps, zero_centered, rounds_last

    @recomputable
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered, self.rounds_last)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool, rounds_last: bool) -> Tensor:
    """Return x / rms(x) · weight, as in ``RMSNorm``."""
    normal = F.rms_norm(x.float(), (x.shape[-1],), eps=eps)
    if zero_centered or rounds_last:
        return (normal * (1 + weight.float() if zero_centered else weight.float())).to(x.dtype)
    return normal.to(x.dtype) * weight


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm with a recomputable forward pass."""

    forward = recomputable(nn.LayerNorm.forward)


def norm_of(config: ModelConfig) -> RMSNorm | LayerNorm:
    """Create a norm for hidden states: a LayerNorm or an RMSNorm, as the model's config says."""
    if config.norm == "layernorm":
        return LayerNorm(config.hidden_size, eps=config.norm_eps)
    return rms_norm_of(config, config.hidden_size)


def rms_norm_of(config: ModelConfig, size: int) -> RMSNorm:
    """Create an RMSNorm of ``size`` channels with the options of the model's config."""
    return RMSNorm(size, config.norm_eps, config.zero_centered_norm, config.norm_rounds_last)
