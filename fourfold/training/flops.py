"""Model FLOPs of a decoder and the peak FLOP/s of its device: the two halves of MFU."""

import re
from typing import TYPE_CHECKING, NamedTuple

from fourfold.config.model import ModelConfig
from fourfold.planning.run_workload import workload_of_model

if TYPE_CHECKING:
    import torch

FLOP_FORMULA = (
    "training FLOPs per token = 3 x forward, without recompute; forward = 2 x matmul parameters (LM head with padding, "
    "no embedding lookup) + layers x 4 x K x heads x head_dim, K keys: S / 2 (causal), fewer in a sliding window"
)
"""PaLM's formula (Chowdhery et al. 2022, appendix B), 6N + 12 x layers x heads x head_dim x S, with two changes. Only
the keys that a token sees count (S / 2 of a causal mask, not S). N is the parameters that are multiplied: of a mixture
of experts, the router and the experts that a token goes to."""


class FlopCount(NamedTuple):
    """FLOPs per token, averaged over a sequence; recomputed activations are not counted."""

    matmul_parameters: int
    forward: int
    training: int


def flops_per_token(model: ModelConfig, seq_length: int, frozen: bool = False) -> FlopCount:
    """Count the model FLOPs of one token of a decoder by `FLOP_FORMULA`.

    The planner counts the same (``Workload.model_flops``). Attention is QK^T and PV, 2·K·heads·head_dim FLOPs each
    per token that sees K keys. A causal token sees S/2 on average (exactly (S+1)/2). Backward is twice the forward: one
    matmul for the input gradient, one for the weight gradient. Norms, softmax, rotary embedding and activations are
    left out, as in the source. A `frozen` model (LoRA) has no weight gradients, and its adapters are left out too.
    """
    work = workload_of_model(model).but(seq=seq_length)
    matrices, attention = round(work.token_matrices), round(work.token_attention)
    forward = 2 * matrices + attention
    return FlopCount(matrices, forward, 3 * forward - (2 * matrices if frozen else 0))


def model_tflops_per_device(training_flops_per_token: int, tokens_per_second: float, num_devices: int) -> float:
    """Model TFLOP/s of each device, from the throughput (tokens/s) of all devices together."""
    return training_flops_per_token * tokens_per_second / num_devices / 1e12


class PeakFlops(NamedTuple):
    """The dense peak of one device as PyTorch sees it."""

    flops: float
    """FLOP/s."""
    source: str
    """One sentence that names the published figure."""


def mfu(tflops_per_device: float, peak: PeakFlops | None) -> float | None:
    """Model FLOPs utilization as a fraction of the peak (0.4 is 40 %); None where the peak is unknown."""
    return None if peak is None else tflops_per_device * 1e12 / peak.flops


class _Device(NamedTuple):
    pattern: str  # of torch.cuda.get_device_name()
    label: str
    half: float  # bf16 and fp16, dense
    fp32: float
    source: str


# The first match counts: narrower names come before wider ones.
_DEVICES = (
    _Device(r"\bGH200\b", "NVIDIA GH200", 989e12, 67e12, "NVIDIA GH200 data sheet"),
    _Device(r"\bH200 NVL\b", "NVIDIA H200 NVL", 835.5e12, 60e12, "NVIDIA H200 data sheet"),
    _Device(r"\bH200\b", "NVIDIA H200 SXM", 989e12, 67e12, "NVIDIA H200 data sheet"),
    _Device(r"\bH100 PCIe\b", "NVIDIA H100 PCIe", 756e12, 51e12, "NVIDIA H100 data sheet"),
    _Device(r"\bH100 NVL\b", "NVIDIA H100 NVL", 835.5e12, 60e12, "NVIDIA H100 data sheet"),
    _Device(r"\bH100\b.*\bHBM3\b|\bH100[ -]SXM", "NVIDIA H100 SXM", 989e12, 67e12, "NVIDIA H100 data sheet"),
    _Device(r"\bA100\b", "NVIDIA A100", 312e12, 19.5e12, "NVIDIA A100 data sheet"),
    _Device(r"\bB200\b", "NVIDIA B200", 2.25e15, 75e12, "NVIDIA DGX B200 data sheet, an eighth of a node"),
    _Device(r"\bMI250X\b", "AMD MI250X, one GCD", 191.5e12, 47.85e12, "AMD Instinct MI250X data sheet, half a card"),
    _Device(r"\bMI300X\b", "AMD MI300X", 1307e12, 163.4e12, "AMD Instinct MI300X data sheet"),
)


def peak_flops(device_name: str, dtype: "torch.dtype | str") -> PeakFlops | None:
    """Look up the dense (no sparsity) peak of a device for matrix products in `dtype`.

    `device_name` is from `torch.cuda.get_device_name()`; `dtype` a torch dtype or its name ("bfloat16", "bf16",
    "float16", "fp16", "float32", "fp32"). None for a device or dtype that is not in the table, for CPUs, and for MIG
    slices, which are only a part of the device they are named after: an MFU against a guess would be worse than none.
    """
    device = next((d for d in _DEVICES if re.search(d.pattern, device_name, re.IGNORECASE)), None)
    if device is None or re.search(r"\bMIG\b", device_name):
        return None
    name = str(dtype).removeprefix("torch.")
    if name in ("bfloat16", "bf16", "float16", "fp16"):
        flops = device.half
    elif name in ("float32", "fp32"):
        flops, name = device.fp32, "fp32"
    else:
        return None
    return PeakFlops(flops, f"{device.label}: {flops / 1e12:g} TFLOP/s dense {name} ({device.source}).")
