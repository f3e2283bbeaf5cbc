"""Random rounding changes results about as much as float32 rounding, and changes nothing if float32 is exact."""

from __future__ import annotations

import torch

from fourfold.verification.random_rounding import RandomRounding

EPS = torch.finfo(torch.float32).eps


def rounding(seed: int = 0) -> RandomRounding:
    return RandomRounding(seed, torch.device("cpu"))


def test_every_result_moves_by_at_most_one_unit_in_the_last_place() -> None:
    x = torch.rand(1000, dtype=torch.float64) + 0.5
    with rounding():
        moved = x * 2 / (2 * x) - 1
    # Each of the four operations rounds once.
    assert 0 < moved.abs().max() < 4.1 * EPS
    assert abs(moved.mean()) < 0.2 * EPS


def test_differences_of_equal_values_show_the_noise_of_the_values() -> None:
    """In float32, the difference of two equal results is exactly zero. With other rounding errors, it would not be."""
    x = torch.rand(1000, dtype=torch.float64) + 0.5
    with rounding():
        difference = x.sqrt() - x.sqrt()
    noise = difference.abs() / x.sqrt()
    assert EPS / 4 < noise.mean() < 2 * EPS
    assert torch.equal(x.float().sqrt() - x.float().sqrt(), torch.zeros(1000))


def test_the_backward_pass_rounds_too() -> None:
    x = torch.rand(1000, dtype=torch.float64).requires_grad_()
    with rounding():
        (gradient,) = torch.autograd.grad(x.exp().sum(), x)
    assert 0 < (gradient / x.exp() - 1).abs().max() < 4 * EPS


def test_views_integers_and_changes_in_place_are_exact() -> None:
    x, five = torch.ones(10, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    with rounding():
        assert torch.equal(x[:5], five)
        x += 1
        assert (torch.arange(10) * 2).tolist() == list(range(0, 20, 2))
    assert torch.equal(x, torch.full((10,), 2.0, dtype=torch.float64))


def test_a_seed_gives_one_result() -> None:
    def rounded(seed: int) -> torch.Tensor:
        with rounding(seed):
            return torch.ones(100, dtype=torch.float64) / 3

    assert torch.equal(rounded(1), rounded(1))
    assert not torch.equal(rounded(1), rounded(2))
