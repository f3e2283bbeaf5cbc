"""Test how attention calls a GPU's kernels. The tests use fake CUDA tensors, and CPU kernels that replace the GPU's
kernels."""

from __future__ import annotations

import re
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_runs import LLAMA, tiny_run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.one_step import MATMUL_WORKSPACES
from fourfold.models import causal_attention
from fourfold.models.causal_attention import AttentionContext, AttentionCore
from fourfold.parallel.attention import block_attention, document_attention
from fourfold.parallel.attention.block_attention import (
    ATEN,
    AttentionScores,
    attend_block,
    attend_block_backward,
    kernel_for,
)
from fourfold.parallel.attention.document_attention import KeyLimits
from fourfold.parallel.grid.process_group import NVIDIA_SETTINGS
from fourfold.parallel.tensor import head
from fourfold.planning.cost.attention_memory import kept_by_core
from fourfold.planning.run_workload import workload_of
from fourfold.verification import recorder
from fourfold.verification.recorder import flash_backward_bytes
from fourfold.verification.trace import trace


def core_and_inputs(device: str, dtype: torch.dtype) -> tuple[AttentionCore, list[Tensor]]:
    """Return the core and inputs of eight query heads over four key-value heads, joined."""
    config = tiny_run(LLAMA | {"position_embedding": "rope"}).model
    sizes = [heads * config.head_dim for heads in (config.num_attention_heads, *2 * [config.num_key_value_heads])]
    generator = None if device == "cuda" else torch.Generator().manual_seed(0)
    return AttentionCore(config), [torch.randn(2, 9, s, generator=generator, device=device).to(dtype) for s in sizes]


@pytest.mark.parametrize(
    ("device", "dtype", "heads"),
    [("cuda", torch.float32, 8), ("cuda", torch.bfloat16, 4), ("cpu", torch.float32, 4)],
)
def test_float32_on_a_gpu_repeats_key_value_heads(device: str, dtype: torch.dtype, heads: int) -> None:
    """torch's only fused GPU kernel for float32 does not support grouped heads. So the key-value heads are repeated,
    because without this kernel torch would store every score."""
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
    """In float32, a GPU stores as many bytes for grouped heads as for one key-value head per query head. A CPU stores
    less."""
    traced, planned = [], []
    for device in ("cpu", "cuda"):
        for model in (LLAMA, LLAMA | {"num_key_value_heads": 8}):
            run = tiny_run(model, training={"precision": "fp32", "device": device})
            traced.append(trace(run, whole=True).memory.activations_peak)
            planned.append(kept_by_core(workload_of(run))[0])
    assert traced[0] < traced[1] and traced[2] == traced[3]
    assert planned[2] == planned[3]


@pytest.mark.parametrize(
    ("shape", "documents", "expected"),
    [
        ((1, 8192, 8192, 32, 8, 128), None, 134_217_728 + 1_048_576 + 134_217_728),
        ((1, 8192, 8192, 32, 32, 128), None, 134_217_728 + 1_048_576),
        ((1, 8192, 8192, 32, 8, 128), 3, 4 * 8576 * 32 * 129 + 134_217_728),
        # The kernel pads 100 features to 104, and sums them as 128.
        ((2, 33, 66, 4, 2, 100), None, 4 * 256 * 4 * 129 + 4 * 2 * 66 * 4 * 104),
        # Above 128, the kernel sums multiples of 64 features.
        ((1, 128, 128, 1, 1, 136), None, 4 * 128 * 193),
    ],
)
def test_flash_backward_allocates_by_torchs_rule(shape: tuple[int, ...], documents: int | None, expected: int) -> None:
    sequences, tokens, keys, heads, key_heads, width = shape
    assert flash_backward_bytes(sequences, tokens, keys, heads, key_heads, width, documents) == expected


@pytest.mark.parametrize("data", [{}, {"mask_documents": True}])
def test_only_the_trace_of_a_gpu_counts_what_flash_backward_allocates(data: dict[str, Any]) -> None:
    peaks = {}
    for device in ("cpu", "cuda"):
        run = tiny_run(
            LLAMA | {"vocab_size": 64},
            training={"precision": "bf16", "device": device},
            data={"source": "python-stdlib"} | data,
        )
        for size in (0, 10**9):
            with patch.object(recorder, "flash_backward_bytes", lambda *_, size=size: size):
                peaks[device, size] = trace(run, whole=True).memory.activations_peak
    assert peaks["cpu", 0] == peaks["cpu", 10**9] and 10**9 < peaks["cuda", 10**9] < 10**9 + peaks["cuda", 0]


def test_a_packed_run_is_traced_with_one_document_per_sequence() -> None:
    """The kernel's backward allocates rows for every document. A document may be as short as a token."""
    counts: list[int | None] = []

    def note(*sizes: int | None) -> int:
        counts.append(sizes[6])
        return 0

    run = tiny_run(training={"precision": "bf16"}, data={"source": "python-stdlib", "mask_documents": True})
    with patch.object(recorder, "flash_backward_bytes", note):
        trace(run, whole=True)
    assert set(counts) == {run.training.micro_batch_size}


def test_workspaces_of_matmuls_follow_torchs_rule() -> None:
    """In torch's CublasHandlePool.cpp, ``parseChosenWorkspaceSize`` adds up size · count, in KiB."""
    sizes = re.findall(r":(\d+):(\d+)", NVIDIA_SETTINGS["CUBLAS_WORKSPACE_CONFIG"])
    assert 2 * sum(int(size) * 2**10 * int(count) for size, count in sizes) == MATMUL_WORKSPACES


def test_the_peak_is_the_same_if_the_heads_gradient_is_added_in_place() -> None:
    """CUDA adds a chunk's product to the gradient in place, and a CPU adds it afterwards. The peak is the same, because
    the later cast of the whole gradient needs as much memory as the separate product."""
    run = tiny_run(LLAMA | {"vocab_size": 4096}, training={"precision": "bf16", "device": "cuda"})
    peak = trace(run, whole=True).memory.total_peak
    with patch.object(head, "_add_matmul", lambda total, left, right: None):
        assert trace(run, whole=True).memory.total_peak == peak


def on_hopper(version: int = 92000) -> Any:
    """Patch what torch reports about a GPU: compute capability 9.0 and this version of cuDNN."""
    return (
        patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        patch.object(torch.backends.cudnn, "version", lambda: version),
    )


def kernel_of(dtype: torch.dtype, width: int, is_masked: bool = False, length: int = 64, device: str = "cuda") -> str:
    with FakeTensorMode():
        tensor = torch.empty(1, 2, length, width, dtype=dtype, device=device)
        return kernel_for(tensor, tensor, is_masked)


def test_ring_blocks_use_cudnn_if_torch_prefers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    capability, version = on_hopper()
    with capability, version:
        assert [kernel_of(bf16, width) for width in (64, 100, 128, 136, 256, 257)] == [
            "cudnn", "cudnn", "cudnn", "flash", "flash", "efficient"
        ]  # fmt: skip
        assert kernel_of(bf16, 128, is_masked=True) == kernel_of(fp32, 128) == "efficient"
        assert kernel_of(bf16, 128, length=1) == "flash", "a single key"
        assert kernel_of(bf16, 128, device="cpu") == "cpu"
        for warns, kernel in ((True, "cudnn"), (False, "flash")):
            with (
                patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True),
                patch.object(torch, "is_deterministic_algorithms_warn_only_enabled", lambda warns=warns: warns),
            ):
                assert kernel_of(bf16, 128) == kernel
        for value, kernel in (("1", "flash"), ("0", "cudnn")):
            monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", value)
            assert kernel_of(bf16, 128) == kernel
        for capability, kernel in {(8, 0): "flash", (9, 0): "cudnn", (10, 3): "cudnn", (12, 0): "flash"}.items():
            with patch.object(torch.cuda, "get_device_capability", lambda device, of=capability: of):
                assert kernel_of(bf16, 128) == kernel
    capability, version = on_hopper(91002)
    with capability, version:
        assert kernel_of(bf16, 128) == "flash"


ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"


class CpuKernels:
    """torch's operators for a GPU, computed by torch's kernel for CPUs. They accept the same arguments as the real
    operators (checked with ``meta`` tensors), require the same widths, and return log-sum-exps of the same shapes."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.endswith(("for_cpu", "for_cpu_backward")):
            return getattr(ATEN, name)
        return partial(self._backward if name.endswith("backward") else self._forward, name)

    def _forward(self, name: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Tensor, ...]:
        made = self._checked(name, (q, k, v, *rest), scale)
        bias, causal = (rest[0], rest[3]) if "flash" not in name else (None, rest[1])
        flash = getattr(ATEN, ON_CPU)
        out, lse = flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        padding = (0, made[1].shape[2] - lse.shape[2])
        return out, torch.nn.functional.pad(lse, padding).view(made[1].shape)

    def _backward(self, name: str, *args: Any, scale: float) -> tuple[Tensor, ...]:
        self._checked(name, args, scale)
        grad, q, k, v, *rest = args
        if "efficient" in name:
            bias, out, lse, causal = rest[0], rest[1], rest[2], args[-1]
            assert lse.shape[2] % 32 == 0
        else:
            bias, out, lse = None, rest[0], rest[1]
            causal = args[11] if "flash" in name else args[-1]
        lse = lse.flatten(2)[..., : q.shape[2]]
        backward = getattr(ATEN, f"{ON_CPU}_backward")
        gradients = backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
        return (*gradients, None) if "efficient" in name else gradients

    def _checked(self, name: str, args: tuple[Any, ...], scale: float) -> Any:
        self.called.append(name)
        assert all(t.shape[-1] % 8 == 0 for t in args[:4] if isinstance(t, Tensor) and t is not None and t.ndim == 4)
        on_meta = [t.to("meta") if isinstance(t, Tensor) else t for t in args]
        return getattr(ATEN, name)(*on_meta, scale=scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [5, 16])
@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
def test_every_gpu_kernel_computes_a_block(kernel: str, width: int, causal: bool) -> None:
    """The length is no multiple of 32. Some heads have a width that is no multiple of 8."""
    generator = torch.Generator().manual_seed(0)
    q, grad = torch.randn(2, 2, 4, 33, width, generator=generator)
    k, v = torch.randn(2, 2, 2, 33, width, generator=generator)
    how, results = (causal, None, AttentionScores(width**-0.5)), []
    kernels = CpuKernels()
    for chosen in ("cpu", kernel):
        with (
            patch.object(block_attention, "kernel_for", lambda *_, chosen=chosen: chosen),
            patch.object(block_attention, "ATEN", kernels),
        ):
            out, lse = attend_block(q, k, v, *how)
            results.append([out, lse, *attend_block_backward(grad, q, out, lse, k, v, *how)])
    torch.testing.assert_close(*results)
    assert len(kernels.called) == 2 and all(kernel in name for name in kernels.called)


def test_packed_documents_of_odd_width_are_padded() -> None:
    """torch's kernel for all documents at once refuses other widths than multiples of 8."""
    widths: list[int] = []

    class Flash:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                widths.extend(t.shape[-1] for t in args[:3])
                return getattr(ATEN, name)(*args, **options)

            return call

    q, grad = torch.empty(2, 2, 40, 4, 100, dtype=torch.bfloat16, device="meta")
    k, v = torch.empty(2, 2, 40, 2, 100, dtype=torch.bfloat16, device="meta")
    limits, scores = KeyLimits(torch.tensor([[7, 40], [40, 40]], device="meta"), 0), AttentionScores(0.1)
    with patch.object(document_attention, "ATEN", Flash()):
        out, lse = document_attention.attend_at_once(q, k, v, limits, scores)
        gradients = document_attention.differentiate_at_once((grad, q, k, v, out), lse, limits, scores)
    assert set(widths) == {104} and len(widths) == 6
    assert [t.shape for t in (out, *gradients)] == [q.shape, q.shape, k.shape, v.shape]
