"""Test mixtures of experts: what parity refuses, resuming on other grids, and errors in lower precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts_of_experts import BIAS, LOSSES
from low_precision import LIMIT, PrecisionError, precision_error
from pool import Pool
from tiny_runs import DEEPSEEK, DEEPSEEK_V3, GPT_OSS, MIXTURE, tiny_run

from fourfold.config.run import ParallelConfig, RunConfig
from fourfold.errors import UserError
from fourfold.verification.parity import resharded


def test_a_run_resumes_with_other_experts_on_a_rank() -> None:
    for grid in ({"dp": 4, "ep": 2}, {"x": 2, "z": 2, "ep": 2}, {"dp": 2}):
        run = tiny_run(MIXTURE, grid)
        assert resharded(run).parallel.ep != run.parallel.ep


@pytest.mark.parametrize(
    ("model", "grid", "sections", "message"),
    [
        (MIXTURE, {"dp": 2, "ep": 4}, {}, "parallel.ep = 4 must divide dp·cp·z = 2"),
        (MIXTURE | {"num_experts": 6}, {"dp": 4, "ep": 4}, {}, "model.num_experts = 6 cannot be split over ep = 4"),
        (
            {"preset": "llama-tiny"},
            {"dp": 2, "ep": 2},
            {},
            "parallel.ep = 2 splits experts, but model.num_experts is 0",
        ),
        (
            MIXTURE | {"moe_intermediate_size": 50},
            {"x": 4},
            {},
            "model.moe_intermediate_size = 50 cannot be split over x",
        ),
        (
            MIXTURE | {"num_experts": 6},
            {"dp": 3, "z": 2, "ep": 3},
            {"training": {"global_batch_size": 12}},
            "ep = 3 must divide z = 2 or be a multiple of it",
        ),
        (MIXTURE, {"x": 2}, {"overlap": {"batch_parts": 2}}, "overlap.batch_parts = 2 is for dense models"),
        (
            MIXTURE,
            {},
            {"training": {"precision": "bf16", "float8": "rowwise"}},
            "float8 = 'rowwise' is for dense models",
        ),
        (MIXTURE, {}, {"training": {"compile": True}}, "training.compile = true does not work with model.num_experts"),
        (MIXTURE, {}, BIAS, "router_bias = true works"),
        ({"preset": "llama-tiny"}, {}, LOSSES, "is for MoE models, but model.num_experts = 0; moe"),
        (DEEPSEEK, {}, BIAS | {"lora": {"rank": 2}}, "freezes the biases of routers"),
    ],
)
def test_what_is_not_supported_is_refused(
    model: dict[str, Any], grid: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        tiny_run(model, grid, **sections)


def precision_body(rank: int, world_size: int, run: RunConfig) -> PrecisionError | None:
    return precision_error(run, torch.device("cpu"), steps=8)


ONE_GROUP = {"n_group": 1, "topk_group": 1}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("model", "grid"),
    [
        (MIXTURE, {"dp": 2, "ep": 2}),
        (MIXTURE, {"x": 2, "z": 2, "ep": 2}),
        (MIXTURE, {"y": 2, "dp": 2, "ep": 2}),
        (GPT_OSS, {"x": 2}),
        (GPT_OSS, {"cp": 2, "ep": 2, "cp_method": "ring"}),
        (DEEPSEEK_V3 | ONE_GROUP, {"x": 2}),
        (DEEPSEEK_V3 | ONE_GROUP, {"y": 2, "ep": 2, "dp": 2}),
        (DEEPSEEK_V3 | ONE_GROUP, {"cp": 2, "cp_method": "ring"}),
    ],
    ids=str,
)
def test_lower_precision_only_rounds(
    pool: Pool, model: dict[str, Any], grid: dict[str, int], precision: str, tmp_path: Path
) -> None:
    # Route every token to all experts, and set a limit that no gate reaches. Otherwise rounding could change on one
    # grid which experts are chosen or which gates are clamped.
    model = model | {"num_experts_per_tok": model["num_experts"]}
    if "swiglu_limit" in model:
        model["swiglu_limit"] = 7.0
    run = tiny_run(model, grid, training={"precision": precision}, output_dir=str(tmp_path), **LOSSES)
    alone = run.model_copy(update={"parallel": ParallelConfig()})
    found, one = (pool.run(r.parallel.world_size, precision_body, r)[0] for r in (run, alone))
    assert found.gradients < LIMIT * one.gradients
    assert found.weights < LIMIT * one.weights
