"""Rotary position embeddings, in Hugging Face's half-split layout, with the usual scaling methods for longer
contexts."""

import math

import torch
from torch import Tensor

from fourfold.config.model import ModelConfig
from fourfold.config.rope_scaling import RopeScaling
from fourfold.models.autograd import Context, Function


def rope_frequencies(
    config: ModelConfig, device: torch.device | str = "cpu", local: bool = False
) -> tuple[Tensor, float]:
    """Return the frequencies of rotary embeddings, including the model's scaling for longer contexts.

    Sources: RoPE (Su et al. 2021, arXiv 2104.09864), llama3 scaling (Grattafiori et al. 2024), and YaRN (Peng et al.
    2023, arXiv 2309.00071).

    Args:
        local: whether to return the frequencies of sliding-window layers, which have their own base.

    Returns:
        The angular frequency of each pair of channels, [d] in float32, and the factor to multiply cos and sin by.
    """
    channels = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device)
    theta = config.rope_local_base_freq if local else config.rope_theta
    frequencies = theta ** (-channels / config.rotary_dim)
    scaling = None if local else config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling), 1.0
    attention_factor = scaling.attention_factor
    if attention_factor is None and scaling.mscale and scaling.mscale_all_dim:
        attention_factor = scaling.yarn_scale(scaling.mscale) / scaling.yarn_scale(scaling.mscale_all_dim)
    elif attention_factor is None:
        attention_factor = scaling.yarn_scale(1.0)
    return _yarn(frequencies, scaling, config), attention_factor


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by ``factor``, keep high frequencies, and interpolate for frequencies in between."""
    assert scaling.original_max_position_embeddings is not None
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Keep high frequencies, divide low frequencies by ``factor``, and interpolate for frequencies in between.

    A channel's frequency is high if the channel makes more than ``beta_fast`` rotations within the original context,
    and low if it makes fewer than ``beta_slow``.
    """
    length = scaling.original_max_position_embeddings
    assert length is not None

    def channel(turns: float) -> float:
        return config.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    ramp = torch.arange(config.rotary_dim // 2, dtype=torch.float32, device=frequencies.device)
    stretch = ((ramp - low) / (high - low or 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * stretch + frequencies * (1 - stretch)


def rope_tables(positions_BS: Tensor, frequencies_d: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, S, 1, d] for every position, in float32."""
    angles = (positions_BS[..., None].float() * frequencies_d)[:, :, None]
    return angles.cos() * scale, angles.sin() * scale


def apply_rope(x_BSND: Tensor, cos_BS1d: Tensor, sin_BS1d: Tensor) -> Tensor:
    """Rotate channels i and i + d of each head as a pair, in float32, for all d pairs. Channels from 2·d on stay
    unchanged."""
    return _Rotate.apply(x_BSND, cos_BS1d, sin_BS1d)


class _Rotate(Function):
    """Rotates the input in the forward pass, and rotates the gradient back in the backward pass.

    Autograd would read and write memory twice as often.
    """

    @staticmethod
    def forward(x_BSND: Tensor, cos_BS1d: Tensor, sin_BS1d: Tensor) -> Tensor:
        return _rotated(x_BSND, cos_BS1d, sin_BS1d)

    @staticmethod
    def setup_context(ctx: Context[None], inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Context[None], grad_BSND: Tensor) -> tuple[Tensor, None, None]:
        cos_BS1d, sin_BS1d = ctx.saved_tensors
        return _rotated(grad_BSND, cos_BS1d, -sin_BS1d), None, None


def _rotated(x_BSND: Tensor, cos_BS1d: Tensor, sin_BS1d: Tensor) -> Tensor:
    d = cos_BS1d.shape[-1]
    first, second = x_BSND[..., :d], x_BSND[..., d : 2 * d]
    out_BSND = torch.empty(x_BSND.shape, dtype=x_BSND.dtype, device=x_BSND.device)
    out_BSND[..., :d] = (first * cos_BS1d).addcmul_(second, sin_BS1d, value=-1)
    out_BSND[..., d : 2 * d] = (second * cos_BS1d).addcmul_(first, sin_BS1d)
    out_BSND[..., 2 * d :] = x_BSND[..., 2 * d :]
    return out_BSND
