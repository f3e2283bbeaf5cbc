"""The table model.rope_scaling of the run file. It stretches rotary embeddings for contexts longer than the model was
trained on."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from fourfold.config.strict import Strict


class RopeScaling(Strict):
    """Scale the rotary frequencies, so that the model can read longer contexts than in its training. The keys have the
    same names as in Hugging Face's config.json."""

    rope_type: Literal["linear", "llama3", "yarn"]
    """Method that scales the frequencies. If a key's description begins with the name of a method, the key is only for
    this method."""
    factor: float = Field(gt=0)
    """Length of the longer context divided by the length of the original context."""
    original_max_position_embeddings: int | None = Field(None, gt=0)
    """Context length that the model was trained with. llama3 and yarn need this key."""
    low_freq_factor: float = Field(1.0, gt=0)
    """llama3: channels that make fewer full turns than this within the original context are scaled by the full
    factor."""
    high_freq_factor: float = Field(4.0, gt=0)
    """llama3: channels that make more full turns than this within the original context do not change."""
    beta_fast: float = Field(32.0, gt=0)
    """yarn: channels that make more full turns than this within the original context do not change."""
    beta_slow: float = Field(1.0, gt=0)
    """yarn: channels that make fewer full turns than this within the original context are scaled by the full factor."""
    truncate: bool = True
    """yarn: beta_fast and beta_slow determine two channel indices. Between these indices, the scaling grows from none
    to the full factor. With true, both indices are rounded to integers. GPT-OSS does not round the indices."""
    attention_factor: float | None = Field(None, gt=0)
    """yarn: factor on the cosines and sines of the rotary embedding. Default: 0.1 ln(factor) + 1."""
    mscale: float | None = Field(None, gt=0)
    """yarn: if mscale and mscale_all_dim are set, the default of attention_factor is (0.1 mscale ln(factor) + 1) / (0.1
    mscale_all_dim ln(factor) + 1) (DeepSeek-V2)."""
    mscale_all_dim: float | None = Field(None, gt=0)
    """yarn: part of the default of attention_factor (see mscale). With latent attention, scores are also multiplied by
    (0.1 mscale_all_dim ln(factor) + 1)²."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rope_type != "linear" and self.original_max_position_embeddings is None:
            raise ValueError(f"rope_type = '{self.rope_type}' needs original_max_position_embeddings, for example 8192")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            # YaRN allows equal numbers (Kimi K2). Then every channel is either fully scaled or unchanged.
            is_step = low == "beta_slow" and self.beta_slow == self.beta_fast
            if getattr(self, low) >= getattr(self, high) and not is_step:
                raise ValueError(
                    f"{low} = {getattr(self, low)} must be below {high} = {getattr(self, high)}; "
                    f"{low} = {getattr(self, high) / 2} works"
                )
        return self

    def yarn_scale(self, mscale: float) -> float:
        """Return 0.1 · mscale · ln(``factor``) + 1, a factor in YaRN, or 1 if ``factor`` is at most 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def no_pairs(head_dim: int, is_derived: bool, share: float, channels: int) -> str:
    """Return the error message for a head with an odd number of rotated channels, or with none. Rotary embeddings
    rotate pairs of channels.

    Args:
        head_dim: Number of channels per head.
        is_derived: Whether head_dim is hidden_size / num_attention_heads.
        share: Fraction of the head's channels that are rotated.
        channels: Number of rotated channels.
    """
    of = " (hidden_size / num_attention_heads)" if is_derived else ""
    return (
        f"head_dim = {head_dim}{of}{'' if share == 1 else f' × partial_rotary_factor = {share}'} gives {channels} "
        "channels, but rotary embeddings rotate pairs of channels; head_dim = "
        f"{2 * max(1, round(head_dim / 2))}{'' if share == 1 else ' with partial_rotary_factor = 1'} works"
    )
