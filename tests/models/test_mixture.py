"""Test a mixture of experts without a grid: compare the layer with a loop over tokens, limit the capacity of experts,
and compare grouped matmuls with a loop over groups."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.config.model import ModelConfig
from fourfold.config.parameter_counts import num_parameters
from fourfold.models import grouped
from fourfold.models.grouped import Groups, grouped_matmul
from fourfold.models.initialize import fill_slice, initialize
from fourfold.models.mixture import Mixture, Order, capacity, order_by_expert, within_capacity
from fourfold.models.recomputation import checkpointed
from fourfold.models.transformer import Transformer
from fourfold.verification.float64 import InFloat64

TINY = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "initializer_range": 0.3,
}  # fmt: skip
DEEPSEEK = {"router_score": "sigmoid", "router_bias": True, "routed_scaling_factor": 2.5}
SHARED = {"shared_expert_intermediate_size": 12, "shared_expert_gate": True}


def mixture(**keys: Any) -> Mixture:
    config = ModelConfig(**(TINY | keys))
    model = Transformer(config)
    initialize(model, config, 3)
    found = model.layers["1"].mlp
    assert isinstance(found, Mixture)
    if config.router_bias:
        assert found.gate.e_score_correction_bias is not None
        found.gate.e_score_correction_bias.data = torch.linspace(-0.3, 0.3, config.num_experts)
    return found


def expected(layer: Mixture, x_BSH: Tensor, config: ModelConfig, factor: float = 0.0) -> Tensor:
    """Compute the layer token by token."""
    most = math.ceil(factor * x_BSH.shape[1] * config.num_experts_per_tok / config.num_experts) if factor else None
    act = F.silu if config.mlp == "swiglu" else (lambda t: F.gelu(t, approximate="tanh"))
    out = torch.zeros_like(x_BSH)
    for b, sequence in enumerate(x_BSH):
        taken = [0] * config.num_experts
        for s, x in enumerate(sequence):
            logits = layer.gate.weight @ x
            scores = logits.softmax(0) if config.router_score == "softmax" else logits.sigmoid()
            bias = layer.gate.e_score_correction_bias
            best = (scores if bias is None else scores + bias).argsort(descending=True)[: config.num_experts_per_tok]
            weights = scores[best] / (scores[best].sum() if config.norm_topk_prob else 1.0)
            for w, e in zip(weights, best.tolist(), strict=True):
                taken[e] += 1
                if most is None or taken[e] <= most:
                    hidden = act(layer.experts.gate_proj[e] @ x) * (layer.experts.up_proj[e] @ x)
                    out[b, s] += config.routed_scaling_factor * w * (layer.experts.down_proj[e] @ hidden)
            if layer.shared_expert is not None:
                gate = 1.0 if layer.shared_expert_gate is None else layer.shared_expert_gate(x).sigmoid()
                out[b, s] += gate * layer.shared_expert(x)
    return out


CASES: list[tuple[dict[str, Any], float]] = [
    ({}, 0.0),
    ({"num_experts_per_tok": 1, "norm_topk_prob": False}, 0.0),
    ({"num_experts_per_tok": 6, "mlp": "geglu"}, 0.0),
    (DEEPSEEK | SHARED, 0.0),
    ({"norm_topk_prob": False, "shared_expert_intermediate_size": 12}, 1.0),
    (DEEPSEEK, 0.5),
]


@pytest.mark.parametrize(("keys", "factor"), CASES, ids=str)
def test_the_layer_and_its_gradients_equal_a_loop_over_tokens(keys: dict[str, Any], factor: float) -> None:
    layer, config = mixture(**keys).double(), ModelConfig(**(TINY | keys))
    layer.capacity_factor = factor
    x = torch.randn(3, 11, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    upstream = torch.randn(3, 11, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    with InFloat64():
        out = layer(x)
    loop = expected(layer, x, config, factor)
    torch.testing.assert_close(out, loop)
    found, right = (torch.autograd.grad(each, inputs, upstream) for each in (out, loop))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


def test_capacity_takes_the_first_tokens_of_each_sequence() -> None:
    experts_BSK = torch.tensor([[[0, 1], [0, 2], [0, 1], [2, 0]], [[0, 1], [1, 0], [2, 1], [2, 1]]])
    kept = within_capacity(experts_BSK, num_experts=3, factor=0.5)  # 0.5 · 4 · 2 / 3 = 1.33, rounded up to two rows
    assert capacity(0.5, torch.tensor([4]), 2, 3).tolist() == [2]
    assert kept.int().tolist() == [
        [[1, 1], [1, 1], [0, 1], [1, 0]],
        [[1, 1], [1, 1], [1, 0], [1, 0]],
    ]


def test_an_expert_without_rows_has_a_gradient_of_zero() -> None:
    rows, weights = torch.randn(5, 4, requires_grad=True), torch.randn(3, 2, 4, requires_grad=True)
    out = grouped_matmul(rows, weights, Groups(torch.tensor([3, 0, 2])))
    torch.testing.assert_close(out, torch.cat([rows[:3] @ weights[0].T, rows[3:] @ weights[2].T]))
    out.sum().backward()
    assert weights.grad is not None and rows.grad is not None
    assert not weights.grad[1].any() and weights.grad[0].any() and weights.grad[2].any()
    torch.testing.assert_close(rows.grad, torch.cat([weights[0].sum(0).expand(3, 4), weights[2].sum(0).expand(2, 4)]))
    nothing = grouped_matmul(rows[:0], weights, Groups(torch.tensor([0, 0, 0])))
    nothing.sum().backward()
    assert nothing.shape == (0, 2)


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Fill newly allocated memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_dropped_rows_that_the_experts_are_given_change_nothing(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the host does not know how many rows were dropped, so the experts get all rows."""
    layer, x = mixture(), torch.randn(3, 11, 24, requires_grad=True)
    layer.capacity_factor = factor
    is_data = torch.arange(11) < torch.tensor([11, 4, 7])[:, None]

    def outputs() -> tuple[Tensor, ...]:
        out = layer(x, is_data)
        return out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))

    without = outputs()
    monkeypatch.setattr(Order, "taken", lambda order, groups: len(order.place_N))
    for one, other in zip(outputs(), without, strict=True):
        torch.testing.assert_close(one, other)


def test_a_layer_that_runs_again_keeps_no_order_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[weakref.ref[Tensor]] = []

    def noted(*operands: Any) -> Order:
        order = order_by_expert(*operands)
        orders.extend(map(weakref.ref, (order.place_N, order.inverse_N)))
        return order

    monkeypatch.setattr("fourfold.models.mixture.order_by_expert", noted)
    layer, x = mixture(), torch.randn(3, 11, 24, requires_grad=True)
    out = checkpointed(layer, x)
    assert len(orders) == 2 and not any(each() is not None for each in orders)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(layer(x).sum(), x)[0])
    assert len(orders) == 6


def test_the_bias_stays_in_float32() -> None:
    model = Transformer(ModelConfig(**(TINY | DEEPSEEK))).to(torch.bfloat16)
    types = {name.rpartition(".")[2]: p.dtype for name, p in model.named_parameters() if ".gate." in name}
    assert types == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}


def test_any_slice_of_a_stack_is_the_slice_of_the_whole() -> None:
    config, shape, name = ModelConfig(**TINY), (6, 300, 250), "layers.0.mlp.experts.gate_proj"
    whole = torch.full(shape, torch.nan)
    fill_slice(whole, name, shape, tuple(slice(0, n) for n in shape), config, 0)
    assert abs(whole.std() - 0.3) < 0.01
    assert len(whole.unique()) > 0.9 * whole.numel() / 2
    for slices in ((slice(2, 4), slice(0, 300), slice(0, 250)), (slice(5, 6), slice(150, 300), slice(50, 75))):
        part = torch.full([s.stop - s.start for s in slices], torch.nan)
        fill_slice(part, name, shape, slices, config, 0)
        assert torch.equal(part, whole[slices])


def test_parameters_are_counted() -> None:
    for keys in ({}, DEEPSEEK | SHARED, {"first_k_dense_replace": 1}):
        config = ModelConfig(**(TINY | keys))
        with torch.device("meta"):
            model = Transformer(config)
        assert num_parameters(config) == sum(p.numel() for p in model.parameters())
        assert [isinstance(block.mlp, Mixture) for block in model.blocks] == [config.is_sparse(n) for n in (0, 1)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7 is more than num_experts = 6"),
        ({"mlp": "gelu"}, "needs gated MLPs, and mlp = 'gelu'"),
        ({"first_k_dense_replace": 2}, "leaves no layer with experts, because num_hidden_layers = 2"),
        ({"shared_expert_gate": True}, "shared_expert_intermediate_size = 20 works"),
        ({"num_experts": 0, "router_bias": True}, "router_bias = true has no effect with model.num_experts = 0"),
    ],
)
def test_impossible_experts_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(TINY | keys))


NEEDS_THE_KERNEL = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch 2.11 has no public grouped product")


def grouped_by(by_kernel: bool, sizes: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the output and the gradients of a grouped matmul in bf16, computed by one kernel or by a loop."""
    monkeypatch.setattr(grouped, "has_kernel", lambda *operands: by_kernel)
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(sizes), 16), (len(sizes), 32, 16))
    inputs = [torch.randn(shape, generator=generator).bfloat16().to(device).requires_grad_() for shape in shapes]
    out = grouped_matmul(inputs[0], inputs[1], Groups(torch.tensor(sizes, device=device)))
    return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]


@NEEDS_THE_KERNEL
def test_the_grouped_kernel_equals_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, kernel = (grouped_by(by_kernel, [8, 0, 16], "cpu", monkeypatch) for by_kernel in (False, True))
    for one, other in zip(kernel, loop, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@NEEDS_THE_KERNEL
@pytest.mark.parametrize("sizes", [[0, 24, 0], [0, 0, 7, 0, 1, 0], [129, 0, 0, 3], [1, 0]], ids=str)
def test_the_gpu_kernel_supports_empty_groups(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of an empty group's matrix is zero, whatever the memory held before (pytorch issue 172439)."""
    loop = grouped_by(False, sizes, "cuda", monkeypatch)
    poison = [torch.full((len(sizes), 32, 16), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    del poison  # the kernel's output will reuse this memory
    kernel = grouped_by(True, sizes, "cuda", monkeypatch)
    assert not kernel[2][[n for n, size in enumerate(sizes) if not size]].any()
    for one, other in zip(kernel, loop, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
