"""The peak memory of a step equals the trace's peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_device import PACKED, run_on

from benchmarks.one_step import step_of

WIDE_BLOCKS = {"preset": "llama3-8b", "rope_scaling": None, "num_hidden_layers": 2, "vocab_size": 32_000}
"""Blocks as wide as Llama 3 8B's, with a vocabulary so small that several processes fit on a GPU."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"activation_checkpoint": {"mode": "selective"}},
    "full": {"activation_checkpoint": {"mode": "full"}},
    "offloaded": {"activation_checkpoint": {"mode": "full", "offload": True}},
    "packed": PACKED,
    "mixture": {"model": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}},
}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_within_3_percent_of_the_trace(
    name: str, gpu: torch.device, record_property: Callable[[str, object], None]
) -> None:
    sections = {key: value for key, value in CASES[name].items() if key != "model"}
    sizes = {"seq_length": 4096, "global_batch_size": 2, "micro_batch_size": 1}
    run = run_on(gpu, WIDE_BLOCKS | CASES[name].get("model", {}), "bf16", training=sizes, **sections)
    figures = step_of(run, gpu)
    record_property("memory", {key: figures[key] for key in figures if key.endswith(("gib", "trace"))})
    assert figures["over_trace"] == pytest.approx(1, abs=0.03), figures


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "packed"])
def test_the_measured_step_runs_without_allocator_statistics(name: str) -> None:
    """Run the test's code on a CPU: the trace and the step, but no measured peak, because the CPU has no allocator
    statistics."""
    sections = {key: value for key, value in CASES[name].items() if key != "model"}
    figures = step_of(run_on(torch.device("cpu"), {"preset": "llama-tiny"}, "bf16", **sections), torch.device("cpu"))
    assert figures["trace_gib"] > 0 and not figures["waits"] and "over_trace" not in figures
