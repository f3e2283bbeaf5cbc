"""Count a decoder's model FLOPs, and look up the peak FLOP/s of a device. Together they give the MFU."""

import re
import tomllib
from importlib.resources import files
from typing import NamedTuple

from fourfold.config.model import ModelConfig
from fourfold.planning.run_workload import workload_of_model

FLOP_FORMULA = (
    "training FLOPs per token = 3 x forward, without recompute; forward = 2 x matmul parameters (LM head with padding, "
    "no embedding lookup) + layers x 4 x K x heads x head_dim, K keys: S / 2 (causal), fewer in a sliding window; "
    "documents that data.mask_documents keeps apart count as one sequence"
)
"""PaLM's formula (Chowdhery et al. 2022, appendix B), 6N + 12 x layers x heads x head_dim x S, with two changes:

1. Only the keys that a token attends to are counted (S / 2 with a causal mask, not S).
2. N counts only parameters that a token is multiplied with. In an MoE layer, these are the router and the experts that
   the token is routed to.
"""


class FlopCount(NamedTuple):
    """FLOPs per token of the forward pass and of a training step, averaged over a sequence. Recomputation is not
    counted.

    ``matmul_parameters`` is the number of parameters that a token is multiplied with.
    """

    matmul_parameters: int
    forward: int
    training: int


def flops_per_token(model: ModelConfig, seq_length: int, frozen: bool = False) -> FlopCount:
    """Count the model FLOPs per token of a decoder, with `FLOP_FORMULA`. The planner uses the same formula.

    Attention is QK^T and PV. Each takes 2·K·heads·head_dim FLOPs for a token that sees K keys. With a causal mask, S/2
    keys are counted (the exact average is (S+1)/2). The backward pass takes twice as many FLOPs as the forward pass:
    one matmul for the input gradient and one for the weight gradient. Norms, softmax, rotary embedding, and activations
    are not counted, as in the paper. Each prediction layer (``num_nextn_predict_layers``) also calls the head.

    Args:
        model: Sizes of the decoder.
        seq_length: Number of tokens in a sequence.
        frozen: Whether the model's weights are frozen (LoRA). Then gradients of weights are not counted. The FLOPs of
            LoRA adapters are never counted.
    """
    work = workload_of_model(model).but(seq_length=seq_length)
    matrices, attention = round(float(work.token_matrices)), round(float(work.token_attention))
    forward = 2 * matrices + attention
    return FlopCount(matrices, forward, 3 * forward - (2 * matrices if frozen else 0))


class PeakFlops(NamedTuple):
    """The peak FLOP/s of one device, without sparsity. Each half of an AMD MI250X counts as a device, as in PyTorch."""

    flops: float
    """The peak in FLOP/s."""
    source: str
    """A sentence with the published number and its source."""


def mfu(tflops_per_device: float, peak: PeakFlops | None) -> float | None:
    """Return the model FLOPs utilization (0.4 is 40 %), or None if the peak is unknown."""
    return None if peak is None else tflops_per_device * 1e12 / peak.flops


_DEVICES = tomllib.loads((files("fourfold.training") / "device_peaks.toml").read_text(encoding="utf-8"))["devices"]
"""Peak FLOP/s of devices, without sparsity. The first entry whose pattern matches the device's name applies."""


def peak_flops(device_name: str, precision: str, float8: bool = False) -> PeakFlops | None:
    """Look up the dense peak (no sparsity) of a device for matmuls in `precision`.

    Args:
        device_name: The name that `torch.cuda.get_device_name()` returns.
        precision: "bf16", "fp16", or "fp32".
        float8: Whether some matmuls run in float8. Even then, the MFU uses the peak of `precision`, as in the planner.
            So the MFUs of runs with and without float8 are comparable.

    Returns:
        The peak. None for CPUs, for unknown devices, and for MIG slices (a slice is only a part of a device, but has
        the device's name). A guessed peak would be worse than no MFU.
    """
    device = next((d for d in _DEVICES if re.search(d["pattern"], device_name, re.IGNORECASE)), None)
    if device is None or re.search(r"\bMIG\b", device_name):
        return None
    flops = device["fp32" if precision == "fp32" else "half"]
    note = ", also for the float8 matmuls" if float8 else ""
    source = f"{device['label']}: {flops / 1e12:g} TFLOP/s dense {precision}{note} ({device['source']})."
    return PeakFlops(flops, source)
