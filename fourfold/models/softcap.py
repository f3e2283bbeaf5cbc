"""Soft caps for attention scores and logits."""

import torch
from torch import Tensor


def softcapped(t: Tensor, cap: float) -> Tensor:
    """Return c·tanh(t / c), which is between −c and c (Gemma 2, arXiv 2408.00118). Return t if c is 0.

    In this formula, c is ``cap``.
    """
    return cap * torch.tanh(t / cap) if cap else t
