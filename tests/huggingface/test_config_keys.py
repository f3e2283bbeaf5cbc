"""Every key of config.json that transformers reads is honored, refused by its name, or changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_keys import keys_of
from config_sweep import Sweep
from tiny_huggingface import MODELS

from fourfold.huggingface.architectures.families import FAMILIES

pytest.importorskip("transformers")

QUICK = "llama"
LEAST_COMPARED = 60
"""Number of changes that transformers accepts for each family. A sweep whose changes all fail compares nothing."""


def test_keys_are_found_in_the_source_of_transformers() -> None:
    """Declared by the class, popped from its arguments, under another name, and read by shared and by own code."""
    assert {"attention_bias", "rope_scaling", "is_causal"} <= set(keys_of("llama"))
    assert {"sliding_window_pattern", "rope_local_base_freq"} <= set(keys_of("gemma3_text"))
    assert {"num_attention_heads", "scale_attn_by_inverse_layer_idx"} <= set(keys_of("gpt2"))


def test_a_family_of_each_importable_type_is_swept() -> None:
    from transformers import CONFIG_MAPPING

    swept = {kind for kind, _ in MODELS.values()}
    assert {CONFIG_MAPPING[kind].__name__ for kind in FAMILIES} == swept


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != QUICK)) for n in MODELS])
def test_changing_a_key_changes_the_logits_as_in_transformers_or_is_refused(name: str, tmp_path: Path) -> None:
    sweep = Sweep(name, tmp_path)
    assert sweep.faults() == []
    assert sweep.compared >= LEAST_COMPARED
