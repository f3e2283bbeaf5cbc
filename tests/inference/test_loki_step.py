"""One decoding step on single tensors follows the paper, with torch's operations and with compiled kernels."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from tiny_loki import changed, encoder_of, slow_decode
from torch import Tensor

from fourfold.inference.loki import LokiConfig
from fourfold.inference.loki.attend import attend_to_chosen, decode
from fourfold.inference.loki.select import DecodeStep, always_chosen

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(params=["torch", "numba"])
def config(request: pytest.FixtureRequest) -> LokiConfig:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return LokiConfig(min_seq=0, kernels=request.param)


def one_step(kv_heads: int = 2, group: int = 4, length: int = 40, size: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    bases = torch.linalg.qr(normal(kv_heads, size, size)).Q
    return {
        "query": normal(3, kv_heads * group, size),
        "key": normal(3, kv_heads, length, size),
        "value": normal(3, kv_heads, length, size),
        "basis": bases,
    }


def fast(tensors: dict[str, Tensor], d: int, k: int, basis_KDD: Tensor, config: LokiConfig) -> Tensor:
    encoder = encoder_of(basis_KDD[..., :d])
    codes = encoder.encode(tensors["key"])
    value = tensors["value"]
    return decode(tensors["query"], tensors["key"], value, value.sum(2), codes, encoder, k, config, 0.3)


def slow(tensors: dict[str, Tensor], d: int, k: int) -> Tensor:
    rows = zip(tensors["query"], tensors["key"], tensors["value"], strict=True)
    statistics = torch.zeros(2, 12), torch.eye(12).expand(2, -1, -1)
    basis_2KDd = torch.stack([tensors["basis"][..., :d]] * 2)
    return torch.stack([slow_decode(*row, basis_2KDd, k, 0.3, *statistics) for row in rows])


def exact_step(query: Tensor, key: Tensor, value: Tensor, scaling: float, *rest: Tensor) -> DecodeStep:
    """Return a step whose keys are already chosen."""
    seen = value.to(torch.promote_types(value.dtype, torch.float32))
    total = (seen.masked_fill(~rest[0][..., None], 0.0) if rest else seen).sum(2)
    codes = key.to(torch.uint8)
    return DecodeStep(query, query, key, value, total, codes, key.shape[2], LokiConfig(), scaling, *rest)


def without_rest(chosen: Tensor, group: int, counts: Tensor | None = None) -> Tensor:
    """Return scores of codes. They give no attention to keys that are not chosen. With ``counts``, each sequence has
    chosen only this many of its first keys."""
    is_chosen = torch.ones_like(chosen) if counts is None else torch.arange(chosen.shape[-1]) < counts[:, None, None]
    scores = torch.full((*chosen.shape[:2], 40), -1e9).scatter(
        -1, chosen, -1e9 * (1.0 - is_chosen.expand_as(chosen).float())
    )
    return scores[:, :, None].expand(-1, -1, group, -1)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_a_step_follows_the_slow_implementation(config: LokiConfig, group: int) -> None:
    tensors = one_step(group=group)
    for d, k in ((7, 7), (12, 5), (1, 40), (12, 40)):
        torch.testing.assert_close(fast(tensors, d, k, tensors["basis"], config), slow(tensors, d, k))


def test_the_bases_of_two_heads_are_not_exchanged(config: LokiConfig) -> None:
    tensors = one_step()
    right = slow(tensors, 8, 7)
    torch.testing.assert_close(fast(tensors, 8, 7, tensors["basis"], config), right)
    assert (fast(tensors, 8, 7, tensors["basis"].flip(0), config) - right).abs().max() > 0.1


def test_a_sequence_that_sees_nothing_gives_zeros(config: LokiConfig) -> None:
    tensors = one_step()
    visible_B1S = torch.ones(3, 1, 40, dtype=torch.bool)
    visible_B1S[1] = False
    visible_B1S[2, :, 4:] = False
    encoder = encoder_of(tensors["basis"])
    codes = encoder.encode(tensors["key"])
    value = tensors["value"]
    value_sum = value.masked_fill(~visible_B1S[..., None], 0.0).sum(2)
    out = decode(tensors["query"], tensors["key"], value, value_sum, codes, encoder, 6, config, 0.3, visible_B1S)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    few = {name: tensor[2:, :, :4] if name in ("key", "value") else tensor[2:] for name, tensor in tensors.items()}
    torch.testing.assert_close(out[2:], slow(few | {"basis": tensors["basis"]}, 12, 4))


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("broken", [math.nan, -math.nan])
@pytest.mark.parametrize("place", ["query", "key"])
def test_nan_in_a_query_or_in_a_chosen_key_shows(config: LokiConfig, group: int, broken: float, place: str) -> None:
    """The last key is always chosen, so a NaN shows in the step that computes it."""
    tensors = one_step(group=group)
    (tensors["query"].unflatten(1, (2, group))[1, 1] if place == "query" else tensors["key"][1, 1, -1]).fill_(broken)
    out = fast(tensors, 8, 5, tensors["basis"], config).unflatten(1, (2, group))
    assert out[1, 1].isnan().all()
    assert out[0].isfinite().all() and out[2].isfinite().all() and out[1, 0].isfinite().all()


def test_one_head_ranks_by_its_scores(config: LokiConfig) -> None:
    """The scores of the best keys are so far above all other scores that the softmax of the other scores underflows to
    zero. Their scores still rank them."""
    value = torch.linspace(-2.0, 2.0, 600)[None, None, :, None].repeat(1, 1, 1, 2)
    key = value * torch.tensor([1.0, -1.0])  # all exact scores are 0
    query, encoder = torch.full((1, 1, 2), 1000.0), encoder_of(torch.eye(2)[None, :, :1])
    positive = changed(config, sink=0, recent=0)
    # Half of the keys are positive. The rest gets no attention, because the scores of its codes are far lower.
    out = decode(query, key, value, value.sum(2), encoder.encode(key), encoder, 300, positive, 1.0)
    torch.testing.assert_close(out, torch.full_like(out, 1.0), rtol=0.01, atol=0.01)


def test_rows_are_gathered_out_of_a_growing_cache() -> None:
    """In memory, unused space follows the rows of each head, and then come the rows of the next head."""
    room = torch.randn(2, 3, 64, 8)
    chosen = torch.stack([torch.randperm(40)[:5] for _ in range(6)]).view(2, 3, 5)
    query = torch.randn(2, 3, 2, 8)
    found, lse = attend_to_chosen(
        exact_step(query, room[:, :, :40], room[:, :, :40], 1.0), chosen, without_rest(chosen, 2)
    )
    packed = room[:, :, :40].gather(2, chosen[..., None].expand(-1, -1, -1, 8))
    expected = torch.nn.functional.scaled_dot_product_attention(query, packed, packed, scale=1.0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(lse, torch.logsumexp(query @ packed.mT, -1))


def test_some_sequences_attend_to_fewer_keys_or_to_none() -> None:
    """Sums are in fp32 or wider."""
    visible = torch.arange(40) >= torch.tensor([0, 30, 40])[:, None, None]
    chosen = torch.randn(3, 5, 40).masked_fill(~visible, -torch.inf).argsort(-1, descending=True)[..., :6]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        query, keys, values = (torch.randn(3, 5, n, 8, dtype=dtype) for n in (2, 40, 40))
        counts = torch.tensor([6, 4, 0])
        step = exact_step(query, keys, values, 0.5, visible, counts)
        found, _ = attend_to_chosen(step, chosen, without_rest(chosen, 2, counts))
        rows = chosen[..., None].expand(-1, -1, -1, 8)
        counts = torch.tensor([6, 4, 1])[:, None, None, None]
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.double(),
            keys.gather(2, rows).double(),
            values.gather(2, rows).double(),
            attn_mask=torch.arange(6) < counts,
            scale=0.5,
        )
        expected[2] = 0.0
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected.to(dtype))


def test_a_sequence_that_sees_nothing_has_no_gradient() -> None:
    """Otherwise its NaN would spoil the gradients of other sequences."""
    visible = torch.ones(2, 1, 40, dtype=torch.bool)
    visible[1] = False
    encoder = encoder_of(torch.linalg.qr(torch.randn(2, 8, 8)).Q[..., :4])
    with torch.enable_grad():
        query, keys, values = (torch.randn(2, *shape, requires_grad=True) for shape in ((4, 8), (2, 40, 8), (2, 40, 8)))
        codes = encoder.encode(keys)
        value_sum = values.masked_fill(~visible[..., None], 0.0).sum(2)
        config = LokiConfig(k=6, min_seq=0)
        decode(query, keys, values, value_sum, codes, encoder, 6, config, 0.3, visible).sum().backward()
    for tensor in (query, keys, values):
        assert tensor.grad[0].norm() > 0
        assert not tensor.grad[1].any()


def test_counts_on_the_host_choose_keys_on_another_device() -> None:
    """On a GPU, the first and the last keys are found by numbers that are on the host."""
    visible = torch.ones(1, 1, 6, 6, dtype=torch.bool, device="meta")
    kept = always_chosen(LokiConfig(), 8, None, visible, 6, "meta")
    assert kept is not None and kept.shape == visible.shape
