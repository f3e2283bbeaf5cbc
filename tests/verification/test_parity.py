"""Every layout computes the same results as one process. These are the most important tests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import layouts
import layouts_of_experts
import layouts_of_latents
import layouts_of_linear_attention
import layouts_of_multi_token
import numpy as np
import pytest
import torch
from layouts import DEEP_GPT, GOLDFISH, GROUPS, ONE_SEQUENCE, PACKED, Case
from pool import Pool
from tiny_runs import (
    ARCEE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    EXAONE4,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    LLAMA,
    NEOX,
    OLMO2,
    QWEN,
    SLIDING,
    SMOLLM3,
    STABLELM,
    YOUTU,
    tiny_run,
)  # fmt: skip
from tuned_products import parity_on_cpu

from fourfold.config.model import IGNORE_INDEX
from fourfold.config.run import RunConfig
from fourfold.data.masks import labels_of
from fourfold.errors import UserError
from fourfold.huggingface.architectures.written_config import config_of
from fourfold.verification.batches import RandomSamples
from fourfold.verification.comparison import Against
from fourfold.verification.deviation import deviation, deviations, replica_difference
from fourfold.verification.parity import resharded
from fourfold.verification.parity_report import ParityReport
from fourfold.verification.reference_labels import kept_tokens


def parity_body(rank: int, world_size: int, run: RunConfig, against: Against = "plain") -> ParityReport | None:
    return parity_on_cpu(run, against=against)


def check(pool: Pool, case: Case, folder: Path, against: Against = "plain") -> None:
    model, grid, sections = case
    run = tiny_run(model, grid, output_dir=str(folder), **sections)
    report = pool.run(run.parallel.world_size, parity_body, run, against)[0]
    assert report.ok, report.record()


OTHERS = {
    "experts": layouts_of_experts,
    "latents": layouts_of_latents,
    "linear attention": layouts_of_linear_attention,
    "multi-token": layouts_of_multi_token,
}
CASES = layouts.CASES | {f"{kind}, {name}": case for kind, of in OTHERS.items() for name, case in of.CASES.items()}
SLOW_CASES = layouts.SLOW_CASES | {
    f"{kind}, {name}": case for kind, of in OTHERS.items() for name, case in of.SLOW_CASES.items()
}


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize("name", CASES)
def test_layout_computes_what_one_process_computes(pool: Pool, name: str, tmp_path: Path) -> None:
    check(pool, CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_larger_layout_computes_what_one_process_computes(pool: Pool, name: str, tmp_path: Path) -> None:
    check(pool, SLOW_CASES[name], tmp_path)


EXPERTS = LLAMA | {"num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 48}
SHARED = {"shared_expert_intermediate_size": 48}
DEEPSEEK = {"router_score": "sigmoid", "router_bias": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}

GATED = SHARED | {"shared_expert_gate": True}
LINEAR: dict[str, Any] = {
    "zero_centered_norm": True, "qk_norm": True, "attention_output_gate": True, "partial_rotary_factor": 0.5,
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"num_hidden_layers": 4},
    "qwen2": QWEN | {"qk_norm": False, "num_hidden_layers": 4},
    "qwen3": QWEN | {"attention_bias": False, "num_hidden_layers": 4},
    "phi3": LLAMA | {"partial_rotary_factor": 0.5, "num_hidden_layers": 4},
    "gemma": GEMMA | {"num_hidden_layers": 4},
    "mistral": SLIDING | {"num_hidden_layers": 4},
    "olmo2": OLMO2 | {"num_hidden_layers": 4},
    "olmo3": OLMO2 | {"num_hidden_layers": 4, "sliding_window": 5, "layer_types": GEMMA3["layer_types"]},
    "gemma2": GEMMA2 | {"num_hidden_layers": 4},
    "gemma3_text": GEMMA3 | {"num_hidden_layers": 4},
    "gpt_neox": NEOX | {"num_hidden_layers": 4},
    "mixtral": EXPERTS | {"moe_intermediate_size": 176},
    "gpt2": DEEP_GPT,
    "qwen3_moe": EXPERTS | {"qk_norm": True, "first_k_dense_replace": 1},
    "qwen2_moe": EXPERTS | SHARED | {"attention_bias": True, "shared_expert_gate": True, "norm_topk_prob": False},
    "olmoe": EXPERTS | {"moe_intermediate_size": 176, "qk_norm": True, "qk_norm_over": "all_heads"},
    "glm4_moe": EXPERTS | SHARED | DEEPSEEK | {"partial_rotary_factor": 0.5},
    "gpt_oss": GPT_OSS | {"num_hidden_layers": 4},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v2": DEEPSEEK_V2,
    "youtu": YOUTU | {"num_hidden_layers": 4},
    "granite": GRANITE | {"num_hidden_layers": 4},
    "arcee": ARCEE | {"num_hidden_layers": 4},
    "stablelm": STABLELM | {"num_hidden_layers": 4},
    "smollm3": SMOLLM3,
    "exaone4": EXAONE4 | {"num_hidden_layers": 4},
    "qwen3_5_text": LLAMA | LINEAR,
    "qwen3_5_moe_text": EXPERTS | GATED | LINEAR | {"intermediate_size": 48},
    "qwen3_next": EXPERTS | GATED | LINEAR | {"first_k_dense_replace": 1},
}
"""For each model family of transformers, keys of ``[model]`` that fourfold exports as this family."""

ONE_AXIS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "x": ({"x": 2}, GOLDFISH),
    "y": ({"y": 2}, PACKED),
    "z": ({"z": 2}, GROUPS),
    "dp": ({"dp": 2, "zero": 1}, {}),
    "cp": ({"cp": 2}, PACKED),
    "pp": ({"pp": 2}, ONE_SEQUENCE),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("axis", ONE_AXIS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_computes_what_transformers_computes(pool: Pool, family: str, axis: str, tmp_path: Path) -> None:
    grid, sections = ONE_AXIS[axis]
    model = FAMILIES[family]
    assert config_of(tiny_run(model).model)["model_type"] == family
    check(pool, (model, grid, sections), tmp_path, "transformers")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "gpt_oss", "deepseek_v3"])
def test_expert_parallelism_computes_what_transformers_computes(pool: Pool, family: str, tmp_path: Path) -> None:
    check(pool, (FAMILIES[family], {"dp": 2, "ep": 2}, GOLDFISH), tmp_path, "transformers")


def test_a_model_that_transformers_does_not_have_is_refused(pool: Pool, tmp_path: Path) -> None:
    run = tiny_run(LLAMA | {"qk_norm": True, "norm": "layernorm"}, {"x": 2}, output_dir=str(tmp_path))
    with pytest.raises(UserError, match="no Hugging Face model of any of"):
        pool.run(2, parity_body, run, "transformers")


@pytest.mark.parametrize("strategy", ["hash", "hash-table", "static", "random"])
def test_the_references_own_masks_are_the_loaders(strategy: str) -> None:
    """Parity's reference has its own code for masks. On samples with documents and with tokens before the sequence, it
    must give the loader's masks."""
    goldfish = {"strategy": strategy, "k": 3, "h": 3, "exempt": [5, 9], "seed": 7}
    run = tiny_run(LLAMA, masks={"goldfish": goldfish})
    samples = RandomSamples(run)
    windows = samples.read(np.arange(64))
    kept = windows.answers
    assert kept is not None
    expected = labels_of(windows, samples.masks) != IGNORE_INDEX
    assert np.array_equal(kept_tokens(windows, run.masks.goldfish, [True] * 64).numpy(), expected)
    assert 0.2 < expected.sum() / kept[:, 1:].sum() < 0.8


def test_nan_is_no_small_deviation() -> None:
    exact = torch.ones(3, dtype=torch.float64)
    assert deviation("w", torch.tensor([1.0, math.nan, 1.0]), torch.ones(3), exact).ratio == math.inf


def test_nan_on_all_sides_is_no_agreement() -> None:
    nan, ones = torch.full((3,), math.nan), torch.ones(3)
    found = [deviation("v", ones, ones, ones.double()), deviation("w", nan, nan, nan.double())]
    assert max(found, key=lambda each: each.ratio).tensor == "w"
    assert found[1].ratio == math.inf


def test_a_step_without_a_label_is_refused(pool: Pool, tmp_path: Path) -> None:
    training = {"global_batch_size": 1, "micro_batch_size": 1, "seq_length": 1}
    with pytest.raises(UserError, match="step 1 has no label in the loss of its random samples"):
        pool.run(1, parity_body, tiny_run(LLAMA, {}, training=training, output_dir=str(tmp_path)))


def test_a_gradient_that_is_missing_is_the_largest_deviation() -> None:
    exact = {"w": torch.ones(3, dtype=torch.float64), "v": torch.ones(2, dtype=torch.float64)}
    found = deviations({"w": torch.ones(3)}, exact, exact)
    assert [each.tensor for each in found if each.ratio == math.inf] == ["v"]


def test_what_is_zero_in_theory_is_measured_in_the_rounding_of_one_process() -> None:
    """For example, the gradient of a key bias is zero in theory, so it consists of rounding noise. Parity compares the
    grid's noise with the noise of one process, not with the exact value."""
    exact = torch.full((4,), 1e-18, dtype=torch.float64)
    assert deviation("k_proj.bias", torch.full((4,), 3e-10), torch.full((4,), 1e-10), exact).ratio < 10
    assert deviation("k_proj.bias", torch.full((4,), 3e-8), torch.full((4,), 1e-10), exact).ratio > 10


def test_replicas_are_compared() -> None:
    shared = (slice(0, 2), slice(0, 3))
    parts = [("w", (2, 3), shared, torch.ones(2, 3)), ("w", (2, 3), shared, torch.ones(2, 3))]
    assert replica_difference(parts) == 0
    parts[1][3][0, 1] = 1.5
    assert replica_difference(parts) == 0.5


@pytest.mark.parametrize(
    "grid",
    [
        {"x": 2, "y": 2},
        {"x": 2, "y": 2, "z": 2, "dp": 2},
        {"x": 2, "y": 2, "z": 2, "dp": 2, "zero": 3},
        {"z": 2},
        {"dp": 8},
    ],
    ids=str,
)
def test_resume_is_tried_on_another_grid(grid: dict[str, int]) -> None:
    run = tiny_run(LLAMA, grid, training={"global_batch_size": 16, "micro_batch_size": 1})
    assert resharded(run).parallel != run.parallel
    assert resharded(run).parallel.world_size == run.parallel.world_size
