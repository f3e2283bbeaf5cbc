"""Orthogonalize a matrix approximately with a few matmuls. This is the main step of the optimizer Muon.

Source: Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/. With the published coefficients, five iterations
bring the singular values of a normalized matrix, except tiny ones, into the range from 0.7 to 1.2. For training, this
is as good as singular values of exactly 1.
"""

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7
"""Matrices are divided by their norm, but by at least this number."""


def orthogonalize(matrices_BMN: Tensor) -> Tensor:
    """Orthogonalize each matrix of a stack [B, M, N].

    Divide the matrix by its Frobenius norm, then run the Newton-Schulz iteration x ← a·x + (b·A + c·A²)·x, where A is
    x·xᵀ. A tall matrix is transposed first, so that A is small.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x_BMN = matrices_BMN.mT if is_tall else matrices_BMN
    x_BMN = x_BMN / torch.linalg.vector_norm(x_BMN, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram_BMM = x_BMN @ x_BMN.mT
        gram_BMM = torch.baddbmm(gram_BMM, gram_BMM, gram_BMM, beta=b, alpha=c)
        x_BMN = torch.baddbmm(x_BMN, gram_BMM, x_BMN, beta=a)
    return x_BMN.mT if is_tall else x_BMN


def update_scale(shape: tuple[int, ...]) -> float:
    """Return the factor that gives an orthogonal update the same root mean square as an update of AdamW.

    With this factor, Muon can use AdamW's learning rate and weight decay (Liu et al. 2025, arXiv 2502.16982, eq. 4).

    Args:
        shape: Shape of the full matrix, or of a stack of matrices.
    """
    return 0.2 * math.sqrt(max(shape[-2:]))
