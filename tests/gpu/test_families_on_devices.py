"""Every model family computes the same on a GPU and on a CPU, in float32 and bf16, with plain and packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from one_device import CPU, PACKED, distance, long_sequences, losses_apart, run_on, steps_on, wide
from tiny_runs import DEEPSEEK, DEEPSEEK_V3, DENSE, GPT_OSS, LLAMA, MIXTURE, QWEN_MOE, YOUTU

FAMILIES = DENSE | {
    "mixture": MIXTURE,
    "qwen_moe": QWEN_MOE,
    "deepseek": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "youtu": YOUTU,
    "wide": None,
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_on_a_device_what_it_computes_on_a_cpu(
    family: str, packed: bool, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    """In bf16, the error relative to float32 may be twice as large as on the CPU. Rounding can make routers choose
    other experts, so in bf16 single tensors have no limit."""
    model, more = FAMILIES[family], dict(PACKED) if packed else {}
    if model is None:
        model, more = wide(device), more | {"training": long_sequences(device, 500)}
    exact = steps_on(CPU, run_on(CPU, model, **more))
    found = steps_on(device, run_on(device, model, **more))
    far, losses = distance(found, exact), losses_apart(found, exact)
    record_property("fp32", {"losses": losses, "worst": far.worst, "of": far.name})
    assert far.worst < 2e-4, far
    assert losses < 1e-4, (found.losses, exact.losses)

    rounded_exact = steps_on(CPU, run_on(CPU, model, "bf16", **more))
    rounded = steps_on(device, run_on(device, model, "bf16", **more))
    far, allowed, losses = distance(rounded, exact), distance(rounded_exact, exact), losses_apart(rounded, exact)
    record_property("bf16", {"losses": losses, "rms": far.rms, "rms of the CPU": allowed.rms, "worst": far.worst})
    assert far.rms < 2 * allowed.rms + 1e-3, (far, allowed)
    assert losses < 5e-3, (rounded.losses, exact.losses)


def test_a_wrong_gradient_and_a_wrong_loss_are_seen() -> None:
    exact = steps_on(CPU, run_on(CPU, LLAMA))
    wrong = {name: gradient * (1.001 if "q_proj" in name else 1.0) for name, gradient in exact.gradients.items()}
    far = distance(replace(exact, gradients=wrong), exact)
    assert far.worst == pytest.approx(1e-3) and "q_proj" in far.name
    assert losses_apart(replace(exact, losses=[exact.losses[0], exact.losses[1] * 1.01]), exact) > 9e-3
    with pytest.raises(AssertionError, match=r"not finite: \['embed_tokens.weight'\]"):
        distance(replace(exact, gradients=exact.gradients | {"embed_tokens.weight": torch.tensor(torch.nan)}), exact)
