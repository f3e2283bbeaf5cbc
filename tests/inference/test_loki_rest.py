"""The keys that are not chosen count as one key with their mean value, and the sum of all values follows the cache."""

from __future__ import annotations

import pytest
import torch

from fourfold.inference.loki.rest import ValueSum, share_of_chosen

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("constant", [0.0, 300.0, -300.0])
def test_with_exact_codes_the_share_equals_dense_attention(constant: float) -> None:
    """The codes' scores may lack a constant."""
    scores_S = 3 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    is_chosen_S, is_visible_S = torch.arange(50) < 7, torch.arange(50) < 40
    share, lse = share_of_chosen(
        scores_S, scores_S - constant, is_chosen_S, scores_S - constant, is_visible_S & ~is_chosen_S
    )
    expected = torch.softmax(scores_S[is_visible_S], -1)[is_chosen_S[is_visible_S]].sum()
    torch.testing.assert_close(share.squeeze(), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(lse.squeeze(), scores_S[is_visible_S].logsumexp(0), rtol=1e-4, atol=0)


def test_without_a_rest_the_chosen_keys_get_everything() -> None:
    scores, none = torch.randn(2, 5), torch.zeros(2, 5, dtype=torch.bool)
    assert torch.equal(share_of_chosen(scores, scores, ~none, scores, none)[0], torch.ones(2, 1))


def test_the_sum_follows_everything_that_happens_to_a_cache() -> None:
    generator = torch.Generator().manual_seed(1)
    values, visible = torch.randn(2, 3, 70, 4, generator=generator), torch.rand(2, 1, 70, generator=generator) < 0.7
    kept, is_masked, changes = ValueSum(), False, []
    for _ in range(300):
        change = int(torch.randint(0, 8, (), generator=generator))
        changes.append(change)
        if change <= 2:  # new tokens
            count = (1, 5, 60)[change]
            values = torch.cat([values, torch.randn(len(values), 3, count, 4, generator=generator)], 2)
            visible = torch.cat([visible, torch.rand(len(values), 1, count, generator=generator) < 0.7], 2)
        elif change == 3:
            count = int(torch.randint(1, 60, (), generator=generator))
            count = min(count, values.shape[2] - 1)
            values, visible = values[:, :, :-count], visible[:, :, :-count]
            kept.crop(count)
        elif change == 4:
            order = torch.randint(0, len(values), (2,), generator=generator)
            values, visible = values[order], visible[order]
            kept.select(order)
        elif change == 5:
            values, visible = (each.repeat_interleave(2, 0) for each in (values, visible))
            kept.repeat(2)
            values, visible = values[:2], visible[:2]
            kept.select(torch.tensor([0, 1]))
        elif change == 6:
            is_masked = not is_masked
        else:  # The mask hides a key that was visible before.
            visible = visible.clone()
            visible[0, 0, int(torch.randint(0, values.shape[2], (), generator=generator))] ^= True
        if torch.rand((), generator=generator) < 0.6:  # Not every pass is a step of Loki.
            mask = visible if is_masked else torch.ones_like(visible)
            expected = (values * mask[..., None]).sum(2)
            torch.testing.assert_close(kept.of(values, visible if is_masked else None), expected, rtol=1e-4, atol=1e-4)
    assert set(changes) == set(range(8))


def test_hidden_values_may_be_nan() -> None:
    values, visible = torch.ones(1, 1, 100, 2), torch.arange(100)[None, None] >= 10
    values[:, :, :10] = torch.nan
    assert torch.equal(ValueSum().of(values, visible), torch.full((1, 1, 2), 90.0))


def test_values_in_16_bits_are_summed_in_32() -> None:
    total = ValueSum().of(torch.ones(1, 1, 3000, 1, dtype=torch.bfloat16), None)
    assert total.dtype == torch.float32 and total.item() == 3000
