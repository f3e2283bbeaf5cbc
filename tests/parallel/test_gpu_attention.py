"""What attention asks of a GPU's kernels, seen on fake CUDA tensors and on a CPU that computes as a GPU would."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_runs import LLAMA, tiny_run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fourfold.models import causal_attention
from fourfold.models.causal_attention import AttentionContext, AttentionCore
from fourfold.planning.cost.activations import kept_by_core
from fourfold.planning.run_workload import workload_of
from fourfold.verification.trace import trace


def core_and_inputs(device: str, dtype: torch.dtype) -> tuple[AttentionCore, list[Tensor]]:
    """Eight query heads over four key-value heads, joined."""
    config = tiny_run(LLAMA | {"position_embedding": "rope"}).model
    sizes = [heads * config.head_dim for heads in (config.num_attention_heads, *2 * [config.num_key_value_heads])]
    generator = None if device == "cuda" else torch.Generator().manual_seed(0)
    return AttentionCore(config), [torch.randn(2, 9, s, generator=generator, device=device).to(dtype) for s in sizes]


@pytest.mark.parametrize(
    ("device", "dtype", "heads"),
    [("cuda", torch.float32, 8), ("cuda", torch.bfloat16, 4), ("cpu", torch.float32, 4)],
)
def test_float32_on_a_gpu_repeats_key_value_heads(device: str, dtype: torch.dtype, heads: int) -> None:
    """torch's only GPU kernel for float32 takes no groups; without it every score is computed and kept."""
    asked: list[tuple[int, bool]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, **options: Any) -> Tensor:
        asked.append((k.shape[1], enable_gqa))
        return q

    with FakeTensorMode():
        core, inputs = core_and_inputs(device, dtype)
        with patch.object(causal_attention.F, "scaled_dot_product_attention", attend):
            core(*inputs, AttentionContext())
    assert asked == [(heads, heads != 8)]


def test_repeated_heads_change_no_number() -> None:
    core, inputs = core_and_inputs("cpu", torch.float32)
    results = []
    for is_for_gpu in (False, True):
        core.is_for_gpu = is_for_gpu
        given = [t.clone().requires_grad_() for t in inputs]
        out = core(*given, AttentionContext())
        out.sin().sum().backward()
        results.append([out, *(t.grad for t in given)])
    torch.testing.assert_close(*results)


def test_trace_and_planner_count_repeated_heads() -> None:
    """In float32 a GPU keeps as much for grouped heads as for a key-value head per query head, and a CPU keeps less."""
    traced, planned = [], []
    for device in ("cpu", "cuda"):
        for model in (LLAMA, LLAMA | {"num_key_value_heads": 8}):
            run = tiny_run(model, training={"precision": "fp32", "device": device})
            traced.append(trace(run, whole=True).memory.activations_peak)
            planned.append(kept_by_core(workload_of(run))[0])
    assert traced[0] < traced[1] and traced[2] == traced[3]
    assert planned[2] == planned[3]
