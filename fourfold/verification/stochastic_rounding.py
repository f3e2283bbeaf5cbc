"""Check that stochastic rounding of stored weights is random and has no bias."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fourfold.config.run import RunConfig
from fourfold.verification.one_process import learning_rate
from fourfold.verification.reference_optimizer import ReferenceOptimizer

STANDARD_ERRORS = 6.0
"""Largest allowed result of ``rounding_error``. Correct random rounding hardly ever exceeds it."""


def rounding_error(
    run: RunConfig, before: Mapping[str, Tensor], gradients: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> float:
    """Return how far the rounding of weights in the first step is from correct random rounding, in standard errors.

    Each weight should be one of the two bfloat16 neighbors of its exact value. The probability of the upper neighbor
    should be (exact value − lower neighbor) / (upper neighbor − lower neighbor). Then the rounding errors have a mean
    of zero, and they do not correlate with this probability. If weights are rounded to the nearest neighbor, the
    correlation is large. Matrices that Muon updates are skipped, because Muon itself computes in bfloat16.

    Args:
        run: The run. It must sum gradients in float32, so that clipping does not round them.
        before: The weights before the first step.
        gradients: The gradients of the first step before clipping.
        after: The weights after the first step.

    Returns:
        The error of the mean or the error of the correlation, whichever is larger. The standard errors assume the
        worst case: all processes draw the same random numbers. The result is infinite if a weight is not one of the two
        neighbors of its exact value.
    """
    exact = {name: nn.Parameter(before[name].double()) for name in gradients}
    optimizer = ReferenceOptimizer(exact, run)
    for name, weight in exact.items():
        weight.grad = gradients[name].double()
    nn.utils.clip_grad_norm_(exact.values(), run.optimizer.max_grad_norm)
    optimizer.step(learning_rate(0, run))
    sums = torch.zeros(4, dtype=torch.float64)
    for name, weight in exact.items():
        if name in optimizer.own and run.optimizer.name == "muon":
            continue
        # The upper half of a float32's bits is the next bfloat16 toward zero.
        upper_half = weight.detach().float().view(torch.int32) & -(1 << 16)
        low, high = (bits.view(torch.float32).double() for bits in (upper_half, upper_half + (1 << 16)))
        share, is_high = ((each.detach() - low) / (high - low) for each in (weight, after[name].double()))
        error, variance, slope = is_high - share, share * (1 - share), 2 * share - 1
        if not bool((error.abs() < 1.01).all()):
            return math.inf
        sums += torch.stack([error.sum(), (slope * error).sum(), variance.sum(), (slope**2 * variance).sum()])
    return float((sums[:2].abs() / (run.parallel.world_size * sums[2:].clamp(min=1.0)).sqrt()).max())
