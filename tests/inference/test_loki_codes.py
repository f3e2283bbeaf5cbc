"""A code names the interval that a component of a key lies in. Products of queries with codes approximate scores."""

from __future__ import annotations

import pytest
import torch
from tiny_loki import slow_codes
from torch import Tensor

from fourfold.inference.loki.codes import Encoder, decoded

HEADS, WIDTH = 2, 12


def statistics(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return correlated keys [1, K, S, D] that are not centered, their means and covariances, and directions."""
    generator = torch.Generator().manual_seed(seed)
    mixing_KDD = torch.randn(HEADS, WIDTH, WIDTH, generator=generator)
    keys_KSD = torch.randn(HEADS, 400, WIDTH, generator=generator) @ mixing_KDD + 3.0
    covariances = torch.stack([torch.cov(keys_SD.T, correction=0) for keys_SD in keys_KSD])
    directions = torch.linalg.qr(torch.randn(HEADS, WIDTH, WIDTH, generator=generator)).Q
    return keys_KSD[None], keys_KSD.mean(1), covariances, directions


@pytest.mark.parametrize("d", [1, 4, 7, 12])
def test_codes_count_borders(d: int) -> None:
    keys, means, covariances, directions = statistics()
    encoder = Encoder.of(directions[..., :d], directions[..., :d], means, covariances)
    codes = encoder.encode(keys)
    assert codes.dtype == torch.uint8 and codes.shape[-1] == -(-d // 4)
    found = decoded(codes, torch.float32)
    for head in range(HEADS):
        for c in range(d):
            expected, _ = slow_codes(keys[0, head], directions[head, :, c], means[head], covariances[head])
            assert torch.equal(found[0, head, :, c], expected.float())
    assert not found[..., d:].any()  # the unused codes of the last byte


def test_products_with_codes_rank_like_scores() -> None:
    """Up to a constant, which ranks no key, they are scores whose keys are rounded to the middle of an interval."""
    keys, means, covariances, directions = statistics()
    encoder = Encoder.of(directions, directions, means, covariances)
    queries = torch.randn(1, HEADS, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    approximate = encoder.project_queries(queries) @ decoded(encoder.encode(keys), torch.float32).mT
    exact = queries @ keys.mT
    for ours, scores in zip(approximate.flatten(0, 2), exact.flatten(0, 2), strict=True):
        assert torch.corrcoef(torch.stack([ours, scores]))[0, 1] > 0.9
        slope = ((ours - ours.mean()) * (scores - scores.mean())).sum() / (scores - scores.mean()).square().sum()
        assert 0.8 < slope < 1.2  # so the softmax of the products is a softmax of scores


def test_codes_do_not_depend_on_the_mean_and_the_scale_of_keys() -> None:
    keys, means, covariances, directions = statistics()
    shift = torch.randn(HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    codes = Encoder.of(directions, directions, means, covariances).encode(keys)
    moved = Encoder.of(directions, directions, 5 * means + shift, 25 * covariances).encode(5 * keys + shift[:, None])
    assert (codes != moved).float().mean() < 1e-3  # rounding moves few keys over a border


def test_extreme_keys_get_the_outermost_codes() -> None:
    encoder = Encoder.of(*[torch.eye(4)[None]] * 2, torch.zeros(1, 4), torch.eye(4)[None])
    keys = torch.tensor([-1e30, -2.1, 2.1, 1e30]).view(1, 1, 1, 4)
    assert decoded(encoder.encode(keys), torch.int64).flatten().tolist() == [0, 0, 3, 3]


def test_a_direction_without_variance_is_harmless() -> None:
    encoder = Encoder.of(*[torch.eye(4)[None]] * 2, torch.zeros(1, 4), torch.zeros(1, 4, 4))
    assert encoder.project_queries(torch.ones(1, 1, 1, 4)).isfinite().all()
    assert decoded(encoder.encode(torch.zeros(1, 1, 3, 4)), torch.float32).isfinite().all()
