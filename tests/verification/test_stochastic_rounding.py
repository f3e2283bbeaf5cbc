"""Parity's check of stochastic rounding accepts random rounding, and no other rounding."""

from __future__ import annotations

import pytest
import torch
from mutants_of_dtypes import ROUNDED
from tiny_runs import LLAMA, tiny_run
from torch import Tensor, nn

from fourfold.training.optimizer import stochastically_rounded
from fourfold.verification.one_process import learning_rate
from fourfold.verification.reference_optimizer import ReferenceOptimizer
from fourfold.verification.stochastic_rounding import STANDARD_ERRORS, rounding_error

RUN = tiny_run(LLAMA, **ROUNDED)
NAME = "layers.0.mlp.down_proj.weight"
GENERATOR = torch.Generator().manual_seed(0)
BEFORE = 0.02 * torch.randn(100, 100, generator=GENERATOR).bfloat16()
GRADIENT = 1e-4 * torch.randn(100, 100, generator=GENERATOR)


def exact() -> Tensor:
    """Return the weight after the first step, in float32."""
    weight = nn.Parameter(BEFORE.float())
    weight.grad = GRADIENT.clone()
    ReferenceOptimizer({NAME: weight}, RUN).step(learning_rate(0, RUN))
    return weight.detach()


def error_of(after: Tensor) -> float:
    return rounding_error(RUN, {NAME: BEFORE}, {NAME: GRADIENT}, {NAME: after})


def test_random_rounding_passes() -> None:
    generator = torch.Generator().manual_seed(1)
    errors = [error_of(stochastically_rounded(exact(), generator)) for _ in range(20)]
    assert min(errors) > 0
    assert max(errors) < STANDARD_ERRORS


@pytest.mark.parametrize("noise", [0, 1 << 15, 1 << 16], ids=("down", "nearest", "up"))
def test_rounding_without_randomness_fails(noise: int) -> None:
    upper_half = (exact().view(torch.int32) + noise) & -(1 << 16)
    assert error_of(upper_half.view(torch.float32).bfloat16()) > 3 * STANDARD_ERRORS


def test_a_weight_that_is_no_neighbor_of_its_exact_value_fails() -> None:
    after = exact().bfloat16()
    after[0, 0] *= 1.1
    assert error_of(after) == torch.inf
