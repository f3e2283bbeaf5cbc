"""Gated DeltaNet: computing the delta rule in chunks equals a recurrence token by token, and no token reads another
document."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import HYBRID, QWEN3_NEXT, tiny_run
from torch import Tensor

from fourfold.config.parameter_counts import num_parameters
from fourfold.models import delta_net
from fourfold.models.causal_attention import documents_of
from fourfold.models.delta_net import gated_delta_rule, short_convolution, unit_heads
from fourfold.models.initialize import fill_slice, initialize
from fourfold.models.transformer import IGNORE_INDEX, Transformer
from fourfold.verification.float64 import InFloat64

LENGTHS = (1, 63, 64, 65, 130)
"""Lengths of sequences, around multiples of the chunk of 64 tokens."""

ENDS = ([1, 2, 64, 65, 130], [63, 64, 66, 128, 129, 130], [30, 100, 130], [130])
"""Ends of documents. Some end on the border of a chunk, some have one token, and one is longer than a chunk."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def heads(length: int, sequences: int = 2, dtype: torch.dtype = torch.float64) -> Inputs:
    """Return queries and keys scaled to length 1, values, logarithms of slow and fast decays, and fractions beta."""
    draw = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(sequences, length, 3, width, generator=draw, dtype=dtype) for width in (4, 4, 6))
    decays = -torch.rand(sequences, length, 3, generator=draw, dtype=dtype) * torch.tensor([0.02, 0.5, 8.0])
    fractions = torch.rand(sequences, length, 3, generator=draw, dtype=dtype)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, decays.to(dtype), fractions


def documents(ends: list[list[int]], length: int) -> Tensor:
    filled = [[*row, *[length] * (max(map(len, ends)) - len(row))] for row in ends]
    return documents_of(torch.tensor(filled), length)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decays: Tensor, fractions: Tensor, documents_BS: Tensor | None = None
) -> Tensor:
    """Run eq. 10 of the paper token by token, with the state as a matrix from keys to values."""
    outputs, state = [], torch.zeros(*q.shape[:1], *q.shape[2:], v.shape[-1], dtype=q.dtype)
    for t in range(q.shape[1]):
        if documents_BS is not None and t > 0:
            state = state * (documents_BS[:, t] == documents_BS[:, t - 1])[:, None, None, None]
        state = state * log_decays[:, t, :, None, None].exp()
        read = torch.einsum("bnde,bnd->bne", state, k[:, t])
        change = fractions[:, t, :, None] * (v[:, t] - read)
        state = state + torch.einsum("bnd,bne->bnde", k[:, t], change)
        outputs.append(torch.einsum("bnde,bnd->bne", state, q[:, t]))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_compute_the_recurrence(length: int) -> None:
    inputs = heads(length)
    torch.testing.assert_close(gated_delta_rule(*inputs), recurrence(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", range(len(ENDS)))
def test_chunks_compute_the_recurrence_of_each_document(row: int) -> None:
    inputs = heads(130)
    documents_BS = documents([ENDS[row], ENDS[-1 - row]], 130)
    expected = recurrence(*inputs, documents_BS)
    torch.testing.assert_close(gated_delta_rule(*inputs, documents_BS), expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_fast_decays_keep_their_precision() -> None:
    """The gradients of fast decays are tiny. The rounding errors of larger numbers must not hide them."""
    q, k, v, decays, fractions = heads(130)
    gradients = []
    for dtype in (torch.float64, torch.float32):
        rates = torch.tensor([0.02, 4.0, 8.0], dtype=dtype, requires_grad=True)
        steps = (1.3 + 0.01 * decays).to(dtype)
        gated_delta_rule(*(t.to(dtype) for t in (q, k, v)), -rates * steps, fractions.to(dtype)).sum().backward()
        gradients.append(rates.grad)
    torch.testing.assert_close(gradients[1].double(), gradients[0], rtol=2e-4, atol=0)


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_a_document_is_computed_as_if_alone(ends: list[int]) -> None:
    inputs = heads(130, 1)
    packed = gated_delta_rule(*inputs, documents([ends], 130))
    for begin, end in zip([0, *ends], ends, strict=False):
        alone = gated_delta_rule(*(t[:, begin:end] for t in inputs))
        torch.testing.assert_close(packed[:, begin:end], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_packed", [False, True], ids=["one document", "packed"])
def test_gradients_equal_the_recurrences(length: int, is_packed: bool) -> None:
    ends = [end for end in ENDS[0] if end < length] + [length]
    documents_BS = documents([ends, [length]], length) if is_packed else None
    inputs = [t.requires_grad_() for t in heads(length)]
    weight = torch.randn(2, length, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, expected = (
        torch.autograd.grad((rule(*inputs, documents_BS) * weight).sum(), inputs)
        for rule in (gated_delta_rule, recurrence)
    )
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-11)


def test_gradients_are_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks of four tokens, a sequence of eleven tokens has several chunks."""
    monkeypatch.setattr(delta_net, "LINEAR_CHUNK", 4)
    inputs = [t.requires_grad_() for t in heads(11, 1)]
    assert torch.autograd.gradcheck(lambda *t: gated_delta_rule(*t, documents([[3, 8, 11]], 11)), inputs)


def test_fast_decays_leave_numbers_finite() -> None:
    """Over 64 tokens, the fastest initial decay goes far below the smallest number of float32."""
    q, k, v, _, fractions = heads(130, dtype=torch.float32)
    decays = torch.full_like(fractions, -20.0).requires_grad_()
    out = gated_delta_rule(q, k, v, decays, fractions)
    out.sum().backward()
    assert out.isfinite().all() and decays.grad is not None and decays.grad.isfinite().all()
    own = fractions[..., None] * v * (q * k).sum(-1, keepdim=True)
    torch.testing.assert_close(out, own, rtol=1e-4, atol=1e-6)


def convolved(x_BSC: Tensor, weight_CT: Tensor) -> Tensor:
    """Convolve with torch. T - 1 zeros pad the beginning of the sequence."""
    padded_BCS = F.pad(x_BSC.mT, (weight_CT.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded_BCS, weight_CT[:, None], groups=len(weight_CT)).mT)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 40])
def test_the_convolution_is_torchs(taps: int, length: int) -> None:
    draw = torch.Generator().manual_seed(taps)
    x_BSC = torch.randn(2, length, 5, generator=draw, dtype=torch.float64)
    weight_CT = torch.randn(5, taps, generator=draw, dtype=torch.float64)
    torch.testing.assert_close(short_convolution(x_BSC, weight_CT, None), convolved(x_BSC, weight_CT))


@pytest.mark.parametrize("ends", [[1, 2, 3, 10], [4, 5, 10], [10]], ids=str)
def test_the_convolution_stays_in_a_document(ends: list[int]) -> None:
    draw = torch.Generator().manual_seed(len(ends))
    x_BSC = torch.randn(1, 10, 5, generator=draw, dtype=torch.float64)
    weight_CT = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    packed = short_convolution(x_BSC, weight_CT, documents([ends], 10))
    for begin, end in zip([0, *ends], ends, strict=False):
        torch.testing.assert_close(packed[:, begin:end], convolved(x_BSC[:, begin:end], weight_CT))


def test_key_heads_repeat_for_consecutive_value_heads() -> None:
    t_BSf = torch.randn(2, 3, 4 * 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, by_head = unit_heads(t_BSf, 5, 12), F.normalize(t_BSf.unflatten(-1, (4, 5)), dim=-1)
    assert found.shape == (2, 3, 12, 5)
    for head in range(12):
        torch.testing.assert_close(found[:, :, head], by_head[:, :, head // 3], rtol=1e-5, atol=1e-5)


def model_of(**changes: Any) -> Transformer:
    config = tiny_run(HYBRID | {"initializer_range": 0.2} | changes).model
    model = Transformer(config)
    initialize(model, config, 0)
    return model


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "linear_conv_kernel_dim": 2}, QWEN3_NEXT], ids=str)
def test_parameters_are_counted_right(changes: dict[str, Any]) -> None:
    model = model_of(**changes)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(model.config)


def test_packed_documents_are_computed_as_if_alone() -> None:
    model, lengths = model_of().double(), [7, 1, 12, 60]
    tokens = torch.randint(200, (1, 80), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([lengths]).cumsum(1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with InFloat64():
        packed = model(tokens, None, positions, ends)
        for end, length in zip(ends[0].tolist(), lengths, strict=True):
            alone = model(tokens[:, end - length : end])
            torch.testing.assert_close(packed[:, end - length : end], alone, rtol=1e-10, atol=1e-10)
        assert (packed - model(tokens))[:, 7:].abs().max() > 0.1


def test_no_token_sees_the_future() -> None:
    model = model_of().double()
    tokens = torch.randint(200, (1, 80), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 70] = (changed[0, 70] + 1) % 200
    with InFloat64():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :70], after[:, :70], rtol=1e-10, atol=1e-10)
    assert ((before - after)[0, 70:].abs().amax(-1) > 1e-4).all()


def test_a_model_learns_nothing_from_a_batch_without_labels() -> None:
    model, tokens = model_of(), torch.zeros(1, 8, dtype=torch.long)
    model(tokens, torch.full_like(tokens, IGNORE_INDEX)).backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())


def test_initial_decay_rates_are_uniform_and_a_slice_is_the_slice_of_the_whole() -> None:
    config, name = tiny_run(HYBRID).model, "layers.0.self_attn.core.A_log"
    whole, part = torch.empty(100_000), torch.empty(7)
    fill_slice(whole, name, (100_000,), (slice(0, 100_000),), config, 3)
    fill_slice(part, name, (100_000,), (slice(500, 507),), config, 3)
    assert torch.equal(part, whole[500:507])
    rates = whole.exp()
    assert rates.min() > 0 and rates.max() < 16.001
    assert rates.mean().item() == pytest.approx(8, abs=0.1)
    assert rates.std().item() == pytest.approx(16 / math.sqrt(12), abs=0.05)
    other = torch.empty(100_000)
    fill_slice(other, name.replace("0", "1"), (100_000,), (slice(0, 100_000),), config, 3)
    assert not torch.equal(whole, other)


def test_initial_constants() -> None:
    core = model_of().layers["0"].self_attn.core
    assert torch.equal(core.dt_bias, torch.ones_like(core.dt_bias))
    assert torch.equal(core.norm.weight, torch.ones_like(core.norm.weight)), "also if norms are zero-centered"
