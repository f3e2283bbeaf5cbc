"""One decoding step on single tensors follows the paper, with torch's operations and with compiled kernels."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from tiny_loki import slow_decode
from torch import Tensor

from fourfold.inference.loki import LokiConfig, attend
from fourfold.inference.loki.attend import attend_to_chosen, decode
from fourfold.inference.loki.select import DecodeStep

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
    basis_KDd = basis_KDD[..., :d]
    proxy_BKSd = tensors["key"] @ basis_KDd
    return decode(tensors["query"], tensors["key"], tensors["value"], proxy_BKSd, basis_KDd, k, config, 0.3)


def slow(tensors: dict[str, Tensor], d: int, k: int) -> Tensor:
    rows = zip(tensors["query"], tensors["key"], tensors["value"], strict=True)
    return torch.stack([slow_decode(*row, torch.stack([tensors["basis"][..., :d]] * 2), k, 0.3) for row in rows])


def exact_step(query: Tensor, key: Tensor, value: Tensor, scaling: float, *rest: Tensor) -> DecodeStep:
    """Return a step whose keys are already chosen."""
    return DecodeStep(query, query, key, value, key, key.shape[2], LokiConfig(), scaling, *rest)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_a_step_is_that_of_the_paper(config: LokiConfig, group: int) -> None:
    tensors = one_step(group=group)
    for d, k in ((3, 7), (12, 5), (1, 40), (12, 40)):
        torch.testing.assert_close(fast(tensors, d, k, tensors["basis"], config), slow(tensors, d, k))


def test_all_dims_are_exact_top_k(config: LokiConfig) -> None:
    """This must hold for any orthogonal basis."""
    tensors = one_step()
    other = torch.linalg.qr(torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(6))).Q
    torch.testing.assert_close(
        fast(tensors, 12, 9, other, config), slow(tensors | {"basis": torch.eye(12).expand(2, -1, -1)}, 12, 9)
    )


def test_the_bases_of_two_heads_are_not_exchanged(config: LokiConfig) -> None:
    tensors = one_step()
    right = slow(tensors, 3, 7)
    torch.testing.assert_close(fast(tensors, 3, 7, tensors["basis"], config), right)
    assert (fast(tensors, 3, 7, tensors["basis"].flip(0), config) - right).abs().max() > 0.1


def test_a_sequence_that_sees_nothing_gives_zeros(config: LokiConfig) -> None:
    tensors = one_step()
    visible_B1S = torch.ones(3, 1, 40, dtype=torch.bool)
    visible_B1S[1] = False
    visible_B1S[2, :, 4:] = False
    proxy = tensors["key"] @ tensors["basis"]
    out = decode(
        tensors["query"], tensors["key"], tensors["value"], proxy, tensors["basis"], 6, config, 0.3, visible_B1S
    )
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    few = {name: tensor[2:, :, :4] if name in ("key", "value") else tensor[2:] for name, tensor in tensors.items()}
    torch.testing.assert_close(out[2:], slow(few | {"basis": tensors["basis"]}, 12, 4))


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("broken", [math.nan, -math.nan])
def test_a_key_that_is_no_number_shows(config: LokiConfig, group: int, broken: float) -> None:
    tensors = one_step(group=group)
    tensors["key"][1, 1, 20] = broken
    out = fast(tensors, 3, 5, tensors["basis"], config).unflatten(1, (2, group))
    assert out[1, 1].isnan().all()
    assert out[0].isfinite().all() and out[2].isfinite().all() and out[1, 0].isfinite().all()


def test_one_head_ranks_by_its_scores(config: LokiConfig) -> None:
    """One key is so far above all other keys that their softmax weights underflow to zero. Their scores still rank
    them."""
    value = torch.linspace(-1.0, 1.0, 600)[None, None, :, None].repeat(1, 1, 1, 2)
    key = value.clone()
    key[0, 0, 300] = torch.tensor([300.0, -300.0])  # this key ranks first, but has little weight in attention
    query, basis = torch.ones(1, 1, 2), torch.eye(2)[None, :, :1]
    out = decode(query, key, value, key[..., :1].contiguous(), basis, 20, config, 1.0)
    torch.testing.assert_close(out, torch.full_like(out, value[0, 0, -19:, 0].mean().item()), rtol=0.02, atol=0.02)


def test_rows_are_gathered_out_of_a_growing_cache() -> None:
    """In memory, unused space follows the rows of each head, and then come the rows of the next head."""
    room = torch.randn(2, 3, 64, 8)
    chosen = torch.stack([torch.randperm(40)[:5] for _ in range(6)]).view(2, 3, 5)
    query = torch.randn(2, 3, 2, 8)
    found = attend_to_chosen(exact_step(query, room[:, :, :40], room[:, :, :40], 1.0), chosen)
    packed = room[:, :, :40].gather(2, chosen[..., None].expand(-1, -1, -1, 8))
    expected = torch.nn.functional.scaled_dot_product_attention(query, packed, packed, scale=1.0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_a_few_heads_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result equals attention of all heads at once, also if some sequences attend to fewer keys or to none. Sums
    are in fp32 or wider."""
    monkeypatch.setattr(attend, "GATHER_BYTES", at_once)
    visible = torch.arange(40) >= torch.tensor([0, 30, 40])[:, None, None]
    chosen = torch.randn(3, 5, 40).masked_fill(~visible, -torch.inf).argsort(-1, descending=True)[..., :6]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        query, keys, values = (torch.randn(3, 5, n, 8, dtype=dtype) for n in (2, 40, 40))
        found = attend_to_chosen(exact_step(query, keys, values, 0.5, visible, torch.tensor([6, 4, 0])), chosen)
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
    basis = torch.linalg.qr(torch.randn(2, 8, 8)).Q[..., :4]
    with torch.enable_grad():
        query, keys, values = (torch.randn(2, *shape, requires_grad=True) for shape in ((4, 8), (2, 40, 8), (2, 40, 8)))
        proxy = (keys @ basis).detach()
        decode(query, keys, values, proxy, basis, 6, LokiConfig(k=6, min_seq=0), 0.3, visible).sum().backward()
    for tensor in (query, keys, values):
        assert tensor.grad[0].norm() > 0
        assert not tensor.grad[1].any()
