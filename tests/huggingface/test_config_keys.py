"""Every key of config.json that transformers reads is followed, refused by name, or changes nothing."""

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
"""Smallest number of changes that transformers must accept for each family. Otherwise the sweep would compare
nothing."""


def test_keys_are_found_in_the_source_of_transformers() -> None:
    """The keys are declared by the class, taken from its arguments, renamed, or read by shared code or by the family's
    code."""
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
