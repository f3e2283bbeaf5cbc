"""Soft caps for attention scores and logits."""

import torch
from torch import Tensor


def softcapped(t: Tensor, cap: float) -> Tensor:
    """Return cap · tanh(t / cap), so that all values are between −cap and cap (Gemma 2, arXiv 2408.00118). If ``cap``
    is 0, return t."""
    return cap * torch.tanh(t / cap) if cap else t
