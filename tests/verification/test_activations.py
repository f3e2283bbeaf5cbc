"""A GPT block keeps the activations of Korthikanti et al. 2022 (arXiv 2205.05198), to the byte.

With two bytes per number, their section 4.1 counts 34·s·b·h + 5·a·s²·b bytes for one block. Of these, 2·s·b·h are
dropout masks, which our block does not have. The second term is for attention scores, which flash attention does not
store. Flash attention stores a float32 log-sum-exp for each head and token instead.
"""

from __future__ import annotations

from typing import Any

import pytest
from tiny_runs import GPT, tiny_run

from fourfold.config.parameter_counts import num_parameters
from fourfold.verification.trace import trace

S, B = 512, 2
MODEL = GPT | {"max_position_embeddings": S}


def kept(blocks: tuple[int, int], precision: str, **recompute: Any) -> int:
    """Return how many more bytes a model stores with more blocks."""
    training = {"global_batch_size": B, "micro_batch_size": B, "seq_length": S, "precision": precision}
    few, more = (
        trace(
            tiny_run(MODEL | {"num_hidden_layers": n}, training=training, activation_checkpoint=recompute), whole=True
        ).memory.activations_peak
        for n in blocks
    )
    return more - few


@pytest.mark.parametrize(
    ("precision", "wide"),
    [("bf16", 1), pytest.param("fp16", 1, marks=pytest.mark.slow), pytest.param("fp32", 2, marks=pytest.mark.slow)],
)
def test_a_gpt_block_keeps_what_korthikanti_counts(precision: str, wide: int) -> None:
    model = tiny_run(MODEL).model
    h, a = model.hidden_size, model.num_attention_heads
    statistics = 2 * 2 * 4 * S * B  # two norms, each with a float32 mean and 1/σ
    sums = 4 * a * S * B
    assert kept((2, 3), precision) == wide * 32 * S * B * h + sums + statistics
    assert kept((2, 3), precision, mode="selective", modules=["attention"]) == wide * 32 * S * B * h + statistics
    assert kept((2, 3), precision, mode="full") == wide * 2 * S * B * h


@pytest.mark.slow
def test_every_second_block_recomputed_keeps_half_of_both() -> None:
    assert kept((2, 4), "bf16", mode="full", every=2) == kept((2, 3), "bf16") + kept((2, 3), "bf16", mode="full")


def test_working_copies_of_weights_are_no_activations() -> None:
    """With few tokens, the working copies are larger than all stored activations."""
    training = {"global_batch_size": 1, "micro_batch_size": 1, "precision": "bf16"}
    run = tiny_run(GPT, training=training, activation_checkpoint={"mode": "full"})
    memory = trace(run, whole=True).memory
    assert memory.gathered_weights_peak == 2 * num_parameters(run.model)
    assert memory.activations_peak < memory.gathered_weights_peak
