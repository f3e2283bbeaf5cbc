"""The planner's memory peak equals the trace's peak for mixtures, for DeepSeek's latent attention, for models with
linear attention, and with multi-token prediction, on every rank of the pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from planned_memory import planned_peak

from fourfold.config.run import RunConfig
from fourfold.run_file.load import make_run
from fourfold.verification.trace import trace

MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"preset": "gpt-oss-20b", "num_experts": 16},
    "qwen3": {"preset": "qwen3-30b-a3b", "num_experts": 16},
    "large experts": {"preset": "qwen3-30b-a3b", "num_experts": 8, "num_experts_per_tok": 2},
    "deepseek": {
        "preset": "deepseek-v3",
        "num_experts": 16,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek dense twice": {
        "preset": "deepseek-v3",
        "num_experts": 16,
        "first_k_dense_replace": 2,
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek, one token further": {
        "preset": "deepseek-v3",
        "num_experts": 16,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 1,
    },
    "llama, two tokens further": {"preset": "llama3-8b", "num_nextn_predict_layers": 2},
    "gpt-oss, one token further": {"preset": "gpt-oss-20b", "num_experts": 16, "num_nextn_predict_layers": 1},
    "hybrid": {"preset": "qwen3.5-9b"},
    "hybrid mixture": {"preset": "qwen3-next-80b-a3b", "num_experts": 32},
}

# Model, layers, grid, recompute, tokens per sequence, sequences per micro-batch, micro-batches, and more keys of
# [training] and [overlap].
Case = tuple[str, int, dict[str, Any], str, int, int, int, dict[str, Any]]
TWO_STAGES = {"pp": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 2}
HALF, PARTS = {"reduce_dtype": "bf16"}, {"batch_parts": 2}
OFTEN: list[Case] = [
    ("deepseek", 2, {"z": 4, "zero": 2, "ep": 4}, "none", 2048, 2, 1, {}),
    ("gpt-oss", 4, {"z": 2, "dp": 4}, "selective", 1024, 1, 1, {}),
    ("hybrid", 4, {"z": 2, "dp": 4, "zero": 1}, "selective", 512, 2, 1, {}),
    ("deepseek, one token further", 3, {"z": 4, "ep": 4}, "full", 2048, 1, 2, {}),
    # More ranks shard the experts than a rank has experts.
    ("deepseek dense twice", 3, {"z": 4, "dp": 4, "cp": 2, "zero": 2, "ep": 2}, "none", 1024, 1, 2, {}),
]
SELDOM: list[Case] = [
    ("qwen3", 4, {"z": 4}, "full", 4096, 1, 1, {}),
    ("qwen3", 3, {"z": 4, "cp": 2, "zero": 3}, "selective", 1024, 1, 2, HALF),
    ("qwen3", 4, {"z": 4, "zero": 2, "ep": 2}, "full", 1024, 1, 2, {}),
    ("large experts", 4, {"dp": 2, "cp": 2, "zero": 1}, "selective", 512, 1, 1, {}),
    ("large experts", 3, {"x": 2, "dp": 16, "zero": 3, "ep": 2}, "none", 512, 2, 2, {}),
    ("deepseek dense twice", 3, {"dp": 4, "cp": 2, "zero": 1, "ep": 2}, "selective", 4096, 2, 4, HALF),
    ("gpt-oss", 3, {"y": 2, "z": 2, "zero": 1, "ep": 2}, "selective", 1024, 1, 2, {}),
    ("gpt-oss", 3, {"z": 2, "dp": 2, "zero": 2, "ep": 2}, "full", 4096, 1, 1, HALF | PARTS),
    ("gpt-oss", 4, {"y": 2, "z": 2, "dp": 2, "zero": 3}, "selective", 2048, 1, 2, HALF),
    ("gpt-oss", 4, {"x": 4, "dp": 2, "ep": 2}, "none", 1024, 1, 2, {}),
    ("deepseek", 2, {"z": 8, "zero": 1}, "none", 4096, 2, 1, {}),
    ("deepseek", 3, {"z": 2, "cp": 2, "ep": 4}, "none", 2048, 2, 2, PARTS),
    ("deepseek", 4, {}, "full", 4096, 1, 2, {}),
    ("deepseek", 4, TWO_STAGES | {"z": 4, "ep": 2}, "full", 512, 1, 2, {}),
    ("deepseek", 4, {"z": 4, "dp": 2, "zero": 3, "ep": 2}, "none", 4096, 2, 2, HALF),
    ("deepseek, one token further", 3, {"pp": 2, "z": 2, "ep": 2}, "full", 1024, 1, 2, {}),
    ("gpt-oss, one token further", 4, {"z": 2, "dp": 2, "zero": 1, "ep": 2}, "full", 1024, 1, 2, {}),
    ("llama, two tokens further", 4, {}, "full", 1024, 1, 2, {}),
    ("llama, two tokens further", 4, {"z": 2, "cp": 2}, "none", 2048, 1, 2, {}),
    ("llama, two tokens further", 4, {"x": 2, "y": 2}, "selective", 1024, 2, 1, {}),
    ("llama, two tokens further", 4, {"dp": 4, "zero": 1}, "full", 1024, 1, 2, HALF),
    ("llama, two tokens further", 4, {"dp": 4, "zero": 3}, "none", 1024, 1, 1, {}),
    ("llama, two tokens further", 4, {"z": 2, "pp": 2, "schedule": "GPipe"}, "full", 1024, 1, 4, {}),
    ("llama, two tokens further", 4, {"y": 2, "pp": 2}, "none", 1024, 1, 2, {}),
    ("llama, two tokens further", 8, TWO_STAGES, "none", 1024, 1, 2, {}),
    ("hybrid", 4, {"dp": 4, "zero": 1}, "full", 512, 2, 2, {}),
    ("hybrid", 4, {"z": 2, "dp": 2, "cp": 2, "zero": 2}, "none", 512, 1, 2, {}),
    ("hybrid", 4, {"y": 2, "cp": 2}, "selective", 512, 2, 2, {"precision": "fp32"}),
    ("hybrid", 4, {"x": 2, "y": 2, "z": 2, "zero": 3, "pp": 2, "schedule": "GPipe"}, "full", 512, 1, 2, HALF),
    ("hybrid", 4, {"z": 4, "zero": 3, "pp": 2}, "full", 512, 1, 2, PARTS),
    ("hybrid mixture", 4, {"y": 2, "z": 2, "ep": 2}, "none", 512, 2, 1, {}),
    ("hybrid mixture", 4, {"z": 2, "cp": 2, "ep": 2}, "none", 512, 1, 2, {"precision": "fp32"}),
    ("hybrid mixture", 4, {"z": 2, "dp": 2, "zero": 1, "ep": 4}, "full", 512, 2, 2, HALF),
    ("hybrid mixture", 4, {"x": 2, "z": 2, "cp": 2, "ep": 4, "pp": 2}, "selective", 512, 1, 2, {}),
]


def run_of(case: Case) -> RunConfig:
    model, layers, grid, recompute, tokens, sequences, micro_batches, more = case
    training = {key: value for key, value in more.items() if key != "batch_parts"}
    ranks = grid.get("z", 1) * grid.get("dp", 1)
    return make_run(
        {
            "model": MODELS[model] | {"num_hidden_layers": layers},
            "data": {"source": "python-stdlib"},
            "training": {
                "seq_length": tokens,
                "micro_batch_size": sequences,
                "global_batch_size": sequences * micro_batches * ranks,
                "train_steps": 1,
                "precision": "bf16",
                **training,
            },
            "parallel": grid,
            "overlap": {"batch_parts": more.get("batch_parts", 1)},
            "activation_checkpoint": {"mode": recompute},
        }
    )


@pytest.mark.parametrize("case", [*OFTEN, *(pytest.param(case, marks=pytest.mark.slow) for case in SELDOM)], ids=str)
def test_the_peak_is_that_of_the_trace(case: Case) -> None:
    run = run_of(case)
    traced = trace(run, whole=True)
    for rank, told in enumerate(traced.pipeline or [traced]):
        assert planned_peak(run, rank) == pytest.approx(told.memory.total_peak, rel=0.002), rank
