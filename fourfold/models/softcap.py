"""Soft caps for attention scores and logits."""

from __future__ import annotations

import torch
from torch import Tensor


def softcapped(t: Tensor, cap: float) -> Tensor:
    """Return c·tanh(t / c), which stays between −c and c (Gemma 2, arXiv 2408.00118), or t if c is 0."""
    return cap * torch.tanh(t / cap) if cap else t
